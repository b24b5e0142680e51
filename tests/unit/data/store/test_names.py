"""Which shards and rollouts a store has: none twice, none missing, none of another model."""

import shutil
from dataclasses import replace

import pytest
from stored import INFO, OTHER, ROLLOUTS, header_of, opened, rewrite_header

from megatron_r3.data.store import (
    RolloutStore,
    SamplingSettings,
    StoreError,
    open_stores,
    schema,
    write_shard,
)
from tests.unit.data.store.test_writer import version

FIRST, SECOND = "shard-00000.safetensors", "shard-00001.safetensors"


def refusal(*directories, **options):
    with pytest.raises(StoreError) as refused:
        open_stores(directories, **options)
    return str(refused.value)


@pytest.mark.parametrize(
    "name",
    [
        "shard-00000 (copy).safetensors",
        "shard-00000.bak.safetensors",
        "shard-000002.safetensors",  # 2 is 00002, and has no second name
        "shard-2.safetensors",
        "shard-٠٠٠٠٢.safetensors",  # Arabic digits
        "shard-00002x.safetensors",
        "Shard-00002.safetensors",
        "old.safetensors",
    ],
)
@pytest.mark.parametrize("follow", [None, 0])
def test_other_names_of_files_are_refused(store_dir, name, follow):
    shutil.copy(store_dir / FIRST, store_dir / name)
    message = f"{store_dir / name}: not the name of a shard (shard-00000.safetensors, "
    assert refusal(store_dir, follow_s=follow).startswith(message)


def test_files_of_another_kind_are_left_alone(store_dir):
    for name in ("notes.txt", ".shard-x.tmp", f"{FIRST}.bak"):
        (store_dir / name).write_bytes(b"")
    assert len(opened(store_dir)) == 5


def test_a_shard_that_is_missing(store_dir):
    write_shard(store_dir, INFO, version(8))
    (store_dir / SECOND).unlink()
    assert refusal(store_dir) == (
        f"{store_dir / SECOND}: is missing, though shard-00002.safetensors is there: copy the "
        "missing shard again, or wait until another machine's shard is seen here"
    )
    (store_dir / FIRST).unlink()
    assert refusal(store_dir).startswith(f"{store_dir / FIRST}: is missing, though shard-00002")


def test_a_directory_that_was_copied(store_dir, tmp_path):
    shutil.copytree(store_dir, tmp_path / "copy")
    assert refusal(store_dir, tmp_path / "copy") == (
        f"{tmp_path / 'copy' / FIRST}: is the same shard as {store_dir / FIRST}: name only one of "
        "the two stores, or remove the copy"
    )
    write_shard(tmp_path / "new", INFO, [replace(r, reward=9.0) for r in ROLLOUTS])
    assert len(RolloutStore([store_dir, tmp_path / "new"])) == 10  # names may be the same


def test_identities_tell_shards_apart(store_dir, tmp_path):
    write_shard(tmp_path / "same", INFO, ROLLOUTS[:2])
    write_shard(tmp_path / "other", INFO, [ROLLOUTS[0], replace(ROLLOUTS[1], reward=9.0)])
    write_shard(tmp_path / "other", INFO, ROLLOUTS[2:])
    first, second = (shard.identity for shard in RolloutStore([store_dir]).shards)
    assert [shard.identity for shard in RolloutStore([tmp_path / "same"]).shards] == [first]
    others = [shard.identity for shard in RolloutStore([tmp_path / "other"]).shards]
    assert others[0] not in (first, second)
    assert others[1] == second
    assert all(len(identity) == 16 and int(identity, 16) for identity in (first, second))


def test_two_rollouts_of_one_name(store_dir):
    write_shard(store_dir, INFO, [replace(ROLLOUTS[0], sample=8), ROLLOUTS[3]])
    assert refusal(store_dir) == (
        f"{store_dir / 'shard-00002.safetensors'}: rollout 1 is sample 3 of group 0, policy "
        f"version 7: the same as {store_dir / SECOND}: rollout 1; remove one, or number the "
        "samples of a group"
    )


def test_two_rollouts_of_one_name_when_a_shard_comes(store_dir):
    store = open_stores([store_dir], follow_s=0)
    write_shard(store_dir, INFO, [ROLLOUTS[0]])
    with pytest.raises(
        StoreError, match=r"00002.*: rollout 0 is sample 0 .* the same as .*00000.*: roll"
    ):
        store.refresh()
    assert len(store) == 5


DIFFERENT = {
    "num_experts 16 there, 300 here": {"num_experts": 300},
    "moe_layers [1, 2, 5] there, [1, 2, 6] here": {"moe_layers": (1, 2, 6)},
    "engine 'vllm' there, 'sglang' here; engine_version '0.30.0' there, '0.31.0' here": {
        "engine": "sglang",
        "engine_version": "0.31.0",
    },
    "vocab_size 0 there, 64 here": {"vocab_size": 64},
    "temperature None there, 0.7 here; top_k None there, 20 here": {
        "sampling": SamplingSettings(temperature=0.7, top_k=20)
    },
}
OTHER_POLICY = {
    f"router of layer 1 {'aa' * 8} there, {'d' * 16} here (and 2 more)": {
        "router_fingerprint": OTHER
    },
    f"router of layer 2 {'bb' * 8} there, {'e' * 16} here": {
        "router_fingerprint": ("aa" * 8, "e" * 16, "cc" * 8)
    },
    "3 router digests there, 0 here": {"router_fingerprint": ()},
    "policy_stamp '' there, 'v1' here": {"policy_stamp": "v1"},
    "engine_policy '' there, 'step 3' here": {"engine_policy": "step 3"},
}


@pytest.mark.parametrize("message", [*DIFFERENT, *OTHER_POLICY])
def test_a_shard_that_does_not_belong_to_the_others(store_dir, message):
    path = store_dir / SECOND
    body = header_of(path)
    other = replace(INFO, **{**DIFFERENT, **OTHER_POLICY}[message])
    assert schema.differences(INFO, other) == message.split("; ")
    if message.startswith("num_experts"):
        return  # with other experts the routes of the shard would need another dtype
    info = {**body["info"], **{**DIFFERENT, **OTHER_POLICY}[message]}
    info["sampling"] = vars(other.sampling)
    rewrite_header(path, {**body, "info": info})
    told = refusal(store_dir)
    assert told.startswith(
        f"{path}: does not belong to {store_dir / FIRST}: {message}: keep them in stores of their "
        "own"
    )
    assert told.endswith("own") is (message not in OTHER_POLICY)
    assert ("give --rollouts-policy any, or --rollouts-follow" in told) is (message in OTHER_POLICY)
    if message in OTHER_POLICY:
        store = RolloutStore([store_dir], mixed_policies=True)
        assert [shard.info.policy for shard in store.shards] == [INFO.policy, other.policy]
    else:
        assert message in refusal(store_dir, mixed_policies=True)


def test_the_same_infos_have_no_differences():
    assert schema.differences(INFO, replace(INFO)) == []


def test_shard_of_rollout(store_dir):
    store = RolloutStore([store_dir])
    assert [store.shard_of_rollout(index) for index in range(5)] == [0, 0, 1, 1, 1]
