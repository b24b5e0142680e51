"""A checkpoint remembers which rollouts it was trained on."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from once import Once
from training import PART, Policy, fails, half, parts, resumed, same, steps_on, stores, train

from demo.report import series_of
from megatron_r3.data.store import RolloutStore, write_shard
from proof.fidelity.rig.worker import TreeWorker

FOREIGN = ("0" * 16,) * 4


@pytest.fixture(scope="session")
def half_trained(patched: TreeWorker, policy: Policy, once: Once) -> Path:
    """A store in `store`, and in `saved` the checkpoint after two of its four steps."""

    def make(folder: Path) -> None:
        half(patched, policy, stores(policy, folder), folder)

    return once("half-trained", make)


@pytest.fixture
def interrupted(half_trained: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Copies of the half-trained store and its checkpoint, which a test may change."""
    shutil.copytree(half_trained, tmp_path, dirs_exist_ok=True)
    return tmp_path / "store", tmp_path / "saved"


def test_the_same_store_goes_on_wherever_it_lies_now(patched, policy, tmp_path, interrupted):
    store, saved = interrupted
    want = patched.run(train, 1, steps_on(policy, store, 4), timeout_s=120)
    moved = store.rename(tmp_path / "moved")
    assert same(want, patched.run(train, 1, resumed(policy, moved, saved), timeout_s=120))
    again = steps_on(policy, moved, 4)  # control: the first rollouts again are other weights
    assert not same(want, patched.run(train, 1, [*again, "--train-iters", "2"], timeout_s=120))


def test_a_store_that_lost_or_changed_a_shard_is_refused(patched, policy, interrupted):
    store, saved = interrupted
    argv = resumed(policy, store, saved)
    last = store / "shard-00003.safetensors"
    kept = last.read_bytes()
    last.unlink()
    assert "shard-00003.safetensors, which the checkpoint was trained on, is gone" in fails(
        patched, argv
    )
    info, shards = parts(policy)
    changed = [replace(rollout, reward=rollout.reward + 1) for rollout in shards[3]]
    write_shard(store, replace(info, router_fingerprint=()), changed)
    assert "this is not the shard-00003.safetensors that the checkpoint was trained on" in fails(
        patched, argv
    )
    last.write_bytes(kept)  # control: as it was
    patched.run(train, 1, argv, timeout_s=120)


def test_another_store_begins_at_its_first_rollout_and_its_policy_is_checked(
    patched: TreeWorker, policy: Policy, tmp_path: Path, interrupted: tuple[Path, Path]
) -> None:
    _, saved = interrupted
    info, shards = parts(policy)
    plain = replace(info, router_fingerprint=())
    for number, shard in enumerate(shards):
        marked = [replace(r, reward=100.0 * number + i) for i, r in enumerate(shard)]
        write_shard(tmp_path / "next", plain, marked)
        write_shard(tmp_path / "foreign", replace(info, router_fingerprint=FOREIGN), marked)
    events = ["--tensorboard-dir", str(tmp_path / "events")]
    patched.run(train, 1, resumed(policy, tmp_path / "next", saved, *events), timeout_s=120)
    rewards = series_of(tmp_path / "events")["reward"]
    # steps 3 and 4 of the training take the first two parts of the new store
    assert rewards == pytest.approx([(PART - 1) / 2, 100 + (PART - 1) / 2])

    told = fails(patched, resumed(policy, tmp_path / "foreign", saved))
    assert "sampled from another policy" in told
    anyone = resumed(policy, tmp_path / "foreign", saved, "--rollouts-policy", "any")
    patched.run(train, 1, anyone, timeout_s=120)


def test_a_policy_that_was_trained_on_before_is_refused_where_routers_say_nothing(
    patched: TreeWorker, policy: Policy, tmp_path: Path
) -> None:
    info, shards = parts(policy)
    old, new = (
        replace(info, router_fingerprint=(), policy_stamp=digit * 16) for digit in ("a", "b")
    )
    for shard in shards:
        one_policy = [replace(rollout, policy_version=0) for rollout in shard]
        write_shard(tmp_path / "old", old, one_policy)
    write_shard(tmp_path / "stale", old, shards[3])
    write_shard(tmp_path / "new", new, shards[3])
    saved = half(patched, policy, tmp_path / "old", tmp_path)
    told = fails(patched, resumed(policy, tmp_path / "stale", saved))
    assert "this training has updated that policy since: sample from the new policy" in told
    fresh = resumed(policy, tmp_path / "new", saved)
    patched.run(train, 1, fresh, timeout_s=120)


def test_samples_in_another_order_are_refused(patched, policy, interrupted):
    store, saved = interrupted
    packed = ["--rollouts-pack", "--micro-batch-size", "1"]
    told = fails(patched, resumed(policy, store, saved, *packed))
    assert "the checkpoint took its samples as single, this training as single, packs of" in told


@pytest.mark.slow
def test_a_store_that_grew_goes_on_within_its_first_epoch_only(patched, policy, tmp_path):
    info, shards = parts(policy)
    plain = replace(info, router_fingerprint=())
    for shard in shards[:2]:
        write_shard(tmp_path / "grows", plain, shard)
    # two steps are the whole store; the third begins its second epoch
    saved = half(patched, policy, tmp_path / "grows", tmp_path)
    saves = ["--save", str(tmp_path / "later"), "--save-interval", "1", "--exit-interval", "3"]
    patched.run(train, 1, resumed(policy, tmp_path / "grows", saved, *saves), timeout_s=120)
    for shard in shards[2:]:
        write_shard(tmp_path / "grows", plain, shard)
    patched.run(train, 1, resumed(policy, tmp_path / "grows", saved), timeout_s=120)
    told = fails(patched, resumed(policy, tmp_path / "grows", tmp_path / "later"))
    assert "the store has grown since the checkpoint" in told


def test_a_training_without_rollouts_before_begins_at_the_first(patched, policy, tmp_path):
    """The policy's own checkpoint was made by ordinary training, which consumed samples."""
    argv = steps_on(policy, policy.store, 61)  # it was saved after 60
    argv.remove("--finetune")
    events = ["--tensorboard-dir", str(tmp_path)]
    patched.run(train, 1, [*argv, *events], timeout_s=120)
    store = RolloutStore([policy.store])
    (reward,) = series_of(tmp_path)["reward"]
    assert reward == pytest.approx(float(store.column("reward")[:PART].mean()))
