"""The store: what goes in comes out, and what is damaged or foreign is refused by name."""

import os
import pickle
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megatron_r3.routes import Routes, RoutesError
from megatron_r3.store import Rollout, RolloutStore, StoreError, StoreInfo, write_shard
from megatron_r3.store.dataset import RolloutDataset
from megatron_r3.store.writer import metadata_of


def opened(directory):
    """A store, every byte of it checked."""
    store = RolloutStore([directory])
    store.verify()
    return store


INFO = StoreInfo(16, 4, (1, 2, 5), "vllm", "0.30.0", "tiny", ("aa", "bb", "cc"))


def make_rollout(num_tokens, seed=0, experts=16, group=0, reward=1.0):
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(experts)[:4] for _ in range(3 * (num_tokens - 1))]
    routes = Routes.from_array(np.array(rows).reshape(3, num_tokens - 1, 4), experts)
    response = np.arange(num_tokens) >= 2
    logprobs = np.where(response, -rng.random(num_tokens), 0).astype(np.float32)
    tokens = rng.integers(0, 50, num_tokens).astype(np.int32)
    return Rollout(tokens, response, logprobs, reward, group, 7, routes)


ROLLOUTS = [make_rollout(n, seed=n, group=n % 2, reward=n / 10) for n in (5, 9, 3, 12, 4)]


@pytest.fixture
def store_dir(tmp_path):
    write_shard(tmp_path / "s", INFO, ROLLOUTS[:2])
    write_shard(tmp_path / "s", INFO, ROLLOUTS[2:])
    return tmp_path / "s"


def test_round_trip_over_shards(store_dir):
    store = RolloutStore([store_dir])
    assert store.info == INFO
    assert len(store) == 5
    for index, expected in enumerate(ROLLOUTS):
        got = store.rollout(index)
        for name in ("tokens_N", "response_N", "logprobs_N", "spans_U2"):
            assert np.array_equal(getattr(got, name), getattr(expected, name))
        assert np.array_equal(got.routes.ids_LTK, expected.routes.ids_LTK)
        assert (got.reward, got.group, got.policy_version) == (
            pytest.approx(expected.reward),
            expected.group,
            7,
        )


def test_routes_by_row_in_any_order_layers_and_with_padding(store_dir):
    store = RolloutStore([store_dir])
    rows = np.concatenate([store.row_ids(3)[::-1], [-1], store.row_ids(0), store.row_ids(4)[1:2]])
    ids, recorded = store.routes(rows, [2, 0])
    want = np.concatenate(
        [
            ROLLOUTS[3].routes.ids_LTK[:, ::-1],
            np.zeros((3, 1, 4)),
            ROLLOUTS[0].routes.ids_LTK,
            ROLLOUTS[4].routes.ids_LTK[:, 1:2],
        ],
        axis=1,
    )
    assert np.array_equal(ids, want[[2, 0]])
    assert np.array_equal(recorded, rows >= 0)
    for rollout in range(5):
        for token, row in enumerate(store.row_ids(rollout)):
            assert store.locate(row) == (rollout, token)


def test_uint16_above_256_experts(tmp_path):
    info = replace(INFO, num_experts=300)
    rollout = make_rollout(6, experts=300)
    assert rollout.routes.ids_LTK.max() > 255
    write_shard(tmp_path, info, [rollout])
    store = RolloutStore([tmp_path])
    assert np.array_equal(store.rollout(0).routes.ids_LTK, rollout.routes.ids_LTK)


def test_every_flipped_bit_and_every_truncation_is_refused(store_dir):
    path = store_dir / "shard-00001.safetensors"
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for position in sorted({0, 8, len(whole) - 1, *rng.integers(0, len(whole), 60).tolist()}):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match="shard-00001"):
            opened(store_dir)
    for length in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(StoreError, match="shard-00001"):
            opened(store_dir)
    path.write_bytes(whole)
    assert len(opened(store_dir)) == 5


def test_mutated_shards_are_the_same_or_refused(store_dir):
    """Some of a shard's bytes changed, cut, repeated or moved: never other rollouts."""
    path = store_dir / "shard-00001.safetensors"
    whole, rng = path.read_bytes(), np.random.default_rng(1)
    kept = 0
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(int(rng.integers(1, 4))):
            at, size = int(rng.integers(len(data))), int(rng.integers(1, 40))
            piece = data[int(rng.integers(len(data))) :][:size]
            kind = rng.integers(4)
            if kind == 0:
                data[at : at + size] = rng.bytes(size)
            elif kind == 1:
                del data[at : at + size]
            elif kind == 2:
                data[at:at] = piece
            else:
                data[at : at + len(piece)] = piece
        path.write_bytes(data)
        try:
            store = opened(store_dir)
        except (StoreError, RoutesError):
            continue
        kept += 1
        for index in range(2, 5):
            got, want = store.rollout(index), ROLLOUTS[index]
            assert np.array_equal(got.tokens_N, want.tokens_N)
            assert np.array_equal(got.routes.ids_LTK, want.routes.ids_LTK)
    assert kept < 50, "hardly any mutation was noticed"


def rewrite(path, **changes):
    """A shard with other tensors, and checksums that fit them: only its meaning is wrong."""
    tensors = {**load_file(path), **changes}
    save_file(tensors, path, metadata_of(INFO, tensors))


def test_ids_out_of_range_and_twice_name_file_rollout_layer_token(store_dir):
    path = store_dir / "shard-00000.safetensors"
    routes = load_file(path)["routes"]
    wrong = routes.copy()
    wrong[1, 4 + 3, 0] = 16  # the second rollout's rows begin at 4
    rewrite(path, routes=wrong)
    with pytest.raises(ValueError, match=r"00000.*: rollout 1: .*0\.\.15 at MoE layer 1, token 3"):
        opened(store_dir)
    wrong = routes.copy()
    wrong[2, 1, 0] = wrong[2, 1, 1]
    rewrite(path, routes=wrong)
    with pytest.raises(ValueError, match=r"rollout 0: .*twice.* at MoE layer 2, token 1"):
        opened(store_dir)


def test_rows_short_by_one(store_dir):
    path = store_dir / "shard-00000.safetensors"
    tensors = load_file(path)
    rewrite(path, routes=tensors["routes"][:, :-1].copy(), recorded=tensors["recorded"][:-1])
    with pytest.raises(StoreError, match=r"routes \(3, 11, 4\) .* \(3, 12, 4\)"):
        opened(store_dir)


WRONG = {
    "logprobs must be finite": {"logprobs": np.full(14, np.nan, np.float32)},
    "reward must be finite": {"reward": np.array([1, np.inf], np.float32)},
    "at least 2 tokens": {"num_tokens": np.array([-5, 19])},
    "2 rollouts, and each": {"num_tokens": np.array([1, 13])},
    "num_tokens is float64": {"num_tokens": np.array([5.0, 9.0])},
    "of 2 dimensions": {"num_tokens": np.array([[5, 9]])},
    "recorded must be 0 or 1": {"recorded": np.full(12, 2, np.uint8)},
    "1 reward; its rollouts need 2": {"reward": np.ones(1, np.float32)},
    "I64 ids for 16 experts": {"routes": np.zeros((3, 12, 4), np.int64)},
    "C64 ids for 16 experts": {"routes": np.zeros((3, 12, 4), np.complex64)},
    "not a shard of this version": {"reward": np.ones(2, np.complex64)},
    "turns are not the tokens": {"turns": np.array([2, 5, 3, 9], np.int32)},
    "its turns are not": {"turns": np.array([2, 6, 3, 9], np.int32)},
    "4 turns; its rollouts need 6": {"num_turns": np.array([1, 2])},
    "num_turns must not": {"num_turns": np.array([-1, 3])},
}


@pytest.mark.parametrize("message", WRONG)
def test_impossible_values_with_fitting_checksums(store_dir, message):
    rewrite(store_dir / "shard-00000.safetensors", **WRONG[message])
    with pytest.raises(StoreError, match=f"shard-00000.*{message.replace('2 rollouts, ', '')}"):
        opened(store_dir)


def test_a_store_named_twice(store_dir):
    with pytest.raises(StoreError, match="named twice"):
        RolloutStore([store_dir, f"{store_dir}/../{store_dir.name}"])


def test_policies_mix_only_on_request(tmp_path):
    write_shard(tmp_path / "a", INFO, ROLLOUTS[:1])
    write_shard(tmp_path / "b", replace(INFO, router_fingerprint=("x", "y", "z")), ROLLOUTS[:1])
    assert len(RolloutStore([tmp_path / "a", tmp_path / "b"], mixed_policies=True)) == 2


@pytest.mark.parametrize(
    "change", [{"moe_layers": ()}, {"topk": 17}, {"router_fingerprint": ("a", "b")}]
)
def test_a_writer_refuses_an_impossible_info(tmp_path, change):
    with pytest.raises(StoreError):
        write_shard(tmp_path / "new", replace(INFO, **change), ROLLOUTS[:1])
    assert not (tmp_path / "new").exists()


def test_a_writer_refuses_rows_short_by_one(tmp_path):
    good = ROLLOUTS[0]
    short = Routes.from_array(good.routes.ids_LTK[:, :-1], 16)
    with pytest.raises(StoreError, match=r"rollout 1: 3 rows of routes for 5 tokens; expected 4"):
        write_shard(tmp_path / "new", INFO, [good, replace(good, routes=short)])
    assert not (tmp_path / "new").exists()


def test_a_writer_refuses_other_models(tmp_path):
    with pytest.raises(StoreError, match=r"\(3, 4, 32\) in a store of \(3, 4, 16\)"):
        write_shard(tmp_path, INFO, [make_rollout(5, experts=32)])


@pytest.mark.parametrize("field", ["logprobs_N", "response_N"])
def test_a_writer_refuses_fields_of_another_length(tmp_path, field):
    wrong = replace(ROLLOUTS[0], **{field: getattr(ROLLOUTS[0], field)[:-1]})
    with pytest.raises(StoreError, match=field):
        write_shard(tmp_path, INFO, [wrong])


def test_a_writer_refuses_nan_logprobs(tmp_path):
    wrong = ROLLOUTS[0].logprobs_N.copy()
    wrong[3] = np.nan
    with pytest.raises(StoreError, match="finite"):
        write_shard(tmp_path, INFO, [replace(ROLLOUTS[0], logprobs_N=wrong)])


def test_stores_of_different_models_do_not_mix(tmp_path):
    write_shard(tmp_path / "a", INFO, ROLLOUTS[:1])
    write_shard(tmp_path / "b", replace(INFO, router_fingerprint=("x", "y", "z")), ROLLOUTS[:1])
    with pytest.raises(StoreError, match="b/shard-00000"):
        RolloutStore([tmp_path / "a", tmp_path / "b"])


def test_groups_of_two_collections_are_not_mixed(tmp_path):
    for name in ("a", "b"):
        write_shard(tmp_path / name, INFO, ROLLOUTS[:2])
        write_shard(tmp_path / name, INFO, ROLLOUTS[2:3])  # another shard, the same group 1
    write_shard(tmp_path / "b", INFO, [replace(ROLLOUTS[0], policy_version=8)])
    groups = RolloutStore([tmp_path / "a", tmp_path / "b"]).groups().tolist()
    assert [r.group for r in ROLLOUTS[:3]] == [1, 1, 1]
    assert len({*groups[:3]}) == len({*groups[3:6]}) == 1
    assert len({groups[0], groups[3], groups[6]}) == 3


def test_missing_empty_and_foreign_directories(tmp_path):
    with pytest.raises(StoreError, match="no such rollout store"):
        RolloutStore([tmp_path / "none"])
    with pytest.raises(StoreError, match="not a rollout store"):
        RolloutStore([tmp_path])
    save_file({"x": np.zeros(3)}, tmp_path / "shard-00000.safetensors")
    with pytest.raises(StoreError, match="not a rollout shard"):
        RolloutStore([tmp_path])


def test_shards_are_appended_and_never_overwritten(store_dir):
    before = {path.name: path.read_bytes() for path in store_dir.iterdir()}
    (store_dir / "shard-00000.safetensors").rename(store_dir / "shard-00003.safetensors")
    write_shard(store_dir, INFO, ROLLOUTS[:1])
    write_shard(store_dir, INFO, ROLLOUTS[:1])
    (store_dir / "shard-old.safetensors").write_bytes(b"a stray file")
    assert len(RolloutStore([store_dir])) == 2 + 3 + 1 + 1
    (store_dir / "shard-old.safetensors").unlink()
    assert sorted(p.name for p in store_dir.iterdir()) == [
        f"shard-{n:05d}.safetensors" for n in (1, 2, 3, 4)
    ]
    assert (store_dir / "shard-00003.safetensors").read_bytes() == before["shard-00000.safetensors"]


def test_killed_writers_leave_whole_shards_only(tmp_path):
    write_shard(tmp_path, INFO, ROLLOUTS)
    cut_short = 0
    for pause in np.random.default_rng(0).uniform(0.0, 0.02, 50):
        writer = os.fork()
        if not writer:
            while True:
                write_shard(tmp_path, INFO, ROLLOUTS)
        time.sleep(pause)
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        cut_short += len([*tmp_path.glob(".shard-*")]) > cut_short
        store = opened(tmp_path)
        assert len(store) == 5 * len(store.shards)
    assert cut_short > 5, "hardly any writer was killed in the middle of a shard"
    assert len(store.shards) > 5


def test_samples_align_inputs_with_what_they_predict(store_dir):
    store = RolloutStore([store_dir])
    dataset = RolloutDataset(store, seq_length=16, num_samples=8)
    assert len(dataset) == 8
    for index in (0, 3, 7):
        sample, rollout = dataset[index], ROLLOUTS[index % 5]
        inputs = len(rollout.tokens_N) - 1
        assert sample["tokens"][:inputs].tolist() == rollout.tokens_N[:-1].tolist()
        assert sample["labels"][:inputs].tolist() == rollout.tokens_N[1:].tolist()
        assert sample["loss_mask"][:inputs].bool().tolist() == rollout.response_N[1:].tolist()
        assert sample["sampled_logprobs"][:inputs].tolist() == rollout.logprobs_N[1:].tolist()
        assert sample["rows"][:inputs].tolist() == store.row_ids(index % 5).tolist()
        assert (sample["rows"][inputs:] == -1).all()
        assert sample["loss_mask"][inputs:].sum() == 0
        assert (sample["advantages"] != 0).sum() in (0, rollout.response_N[1:].sum())


def test_turns_are_kept_also_where_one_follows_the_other(tmp_path):
    one = ROLLOUTS[3]
    response = np.array([0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1], bool)
    runs = replace(one, response_N=response)
    assert runs.spans_U2.tolist() == [[2, 5], [7, 9], [10, 12]]
    split = replace(runs, turns_U2=np.array([[2, 3], [3, 5], [7, 9], [10, 12]]), sample=6)
    write_shard(tmp_path, INFO, [runs, split, ROLLOUTS[0]])
    store = opened(tmp_path)
    assert store.rollout(0).spans_U2.tolist() == runs.spans_U2.tolist()
    assert store.rollout(1).spans_U2.tolist() == split.spans_U2.tolist()
    assert store.column("sample").tolist() == [0, 6, 0]


@pytest.mark.parametrize(
    "turns", [[[2, 12]], [[2, 13]], [[3, 12]], [[5, 2]], [[2, 7], [6, 12]], [[7, 12], [2, 7]], []]
)
def test_a_writer_refuses_turns_that_are_not_the_response(tmp_path, turns):
    rollout = replace(ROLLOUTS[3], turns_U2=np.array(turns).reshape(-1, 2))
    if turns == [[2, 12]]:
        write_shard(tmp_path, INFO, [rollout])
        return
    with pytest.raises(StoreError, match="turns"):
        write_shard(tmp_path, INFO, [rollout])


def test_a_rank_reads_its_layers_and_rows_and_no_other_byte(store_dir):
    store = RolloutStore([store_dir])
    rows = np.concatenate([store.row_ids(1)[2:5], store.row_ids(3)[8:], [-1, -1]])
    store.routes(np.random.default_rng(0).permutation(rows), [0, 2])
    assert sum(shard.bytes_read for shard in store.shards) == 2 * 6 * 4
    again = pickle.loads(pickle.dumps(store.shards[0]))
    assert again.bytes_read == 0
    rows = np.arange(3)
    mine, theirs = (shard.read_routes(rows, [1]) for shard in (again, store.shards[0]))
    assert np.array_equal(mine, theirs)


def test_a_shard_that_is_cut_while_in_use(store_dir):
    store = RolloutStore([store_dir])
    path = store_dir / "shard-00000.safetensors"
    os.truncate(path, 600)
    with pytest.raises(StoreError, match=r"shard-00000.*was cut while it is in use"):
        store.routes(store.row_ids(0), [2])


def test_a_store_that_grows_is_followed(tmp_path):
    def write_later():
        time.sleep(0.3)
        write_shard(tmp_path / "s", INFO, ROLLOUTS[:2])
        time.sleep(0.3)
        newer = [replace(r, policy_version=8) for r in ROLLOUTS[2:]]
        write_shard(tmp_path / "s", replace(INFO, router_fingerprint=("x", "y", "z")), newer)

    writer = threading.Thread(target=write_later)
    writer.start()
    store = RolloutStore([tmp_path / "s"], mixed_policies=True, follow_s=20)
    other = RolloutStore([tmp_path / "s"], mixed_policies=True, follow_s=0)
    assert len(store) == len(other) == 2
    store.wait_for(4)
    writer.join()
    rows = store.row_ids(4)
    ids, _ = other.routes(rows, [1])  # another process hears of a row before it knows the shard
    assert np.array_equal(ids[0], ROLLOUTS[4].routes.ids_LTK[1])
    assert other.shards_of(rows) == [1]
    with pytest.raises(StoreError, match=r"rollout 5 did not come within 0 s; it has 5 rollouts"):
        other.wait_for(5)
    write_shard(tmp_path / "s", INFO, ROLLOUTS[:1])
    with pytest.raises(StoreError, match=r"shard-00002.*policy version 7 after 8"):
        other.wait_for(5)


def test_one_store_can_be_followed(store_dir, tmp_path):
    with pytest.raises(StoreError, match="one store can be followed"):
        RolloutStore([store_dir, tmp_path], follow_s=1)
    with pytest.raises(StoreError, match="the first shard did not come"):
        RolloutStore([tmp_path / "none"], follow_s=0)
