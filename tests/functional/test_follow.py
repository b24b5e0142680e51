"""A store that grows or changes while training runs, and a training that is interrupted."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from slow import slow_except
from training import Policy, fails, half, parts, resumed, same, steps_on, stores, train

from megatron_r3.data.store import Rollout, StoreInfo, write_shard
from megatron_r3.train import launch
from proof.fidelity.rig.rank_process import RankError
from proof.fidelity.rig.worker import TreeWorker

EP2 = ["--expert-model-parallel-size", "2"]


def sampling(folder: Path, info: StoreInfo, shards: list[list[Rollout]]) -> threading.Thread:
    """A thread that has begun to write these shards, with a pause before each."""

    def sample() -> None:
        for shard in shards:
            time.sleep(1.5)
            write_shard(folder, info, shard)

    sampler = threading.Thread(target=sample)
    sampler.start()
    return sampler


@pytest.mark.parametrize("workers", slow_except(["0", "1"], "0"))
def test_a_store_that_grows_trains_as_the_whole_one(patched, policy, tmp_path, workers):
    info, shards = parts(policy)
    unstamped = replace(info, router_fingerprint=())
    for shard in shards:
        write_shard(tmp_path / "whole", unstamped, shard)
    more = ("--num-workers", workers)
    want = patched.run(
        train, 2, steps_on(policy, tmp_path / "whole", 4, *more, *EP2), timeout_s=120
    )

    sampler = sampling(tmp_path / "grows", unstamped, shards)
    follow = ("--rollouts-follow", "60", *more, *EP2)
    got = patched.run(train, 2, steps_on(policy, tmp_path / "grows", 4, *follow), timeout_s=120)
    sampler.join()
    assert same(want, got)
    shards[1], shards[2] = shards[2], shards[1]
    for version, shard in enumerate(shards):
        swapped = [replace(rollout, policy_version=version) for rollout in shard]
        write_shard(tmp_path / "swapped", unstamped, swapped)
    control = steps_on(policy, tmp_path / "swapped", 4, *more, *EP2)
    assert not same(want, patched.run(train, 2, control, timeout_s=120))


def test_an_interrupted_training_goes_on_at_the_next_rollout(patched, policy, tmp_path):
    info, shards = parts(policy)
    for shard in shards:  # one policy, so one version
        write_shard(tmp_path / "store", info, [replace(r, policy_version=0) for r in shard])
    follow = ("--rollouts-follow", "5")
    whole = steps_on(policy, tmp_path / "store", 4, *follow)
    want = patched.run(train, 1, whole, timeout_s=120)
    saved = half(patched, policy, tmp_path / "store", tmp_path, *follow)
    again = resumed(policy, tmp_path / "store", saved, *follow)
    assert same(want, patched.run(train, 1, again, timeout_s=120))


@pytest.mark.parametrize("workers", ["0", "1"])
def test_what_never_comes_and_what_is_foreign_end_the_training_with_a_reason(
    patched: TreeWorker, policy: Policy, tmp_path: Path, workers: str
) -> None:
    info, shards = parts(policy)
    more = ("--num-workers", workers, "--rollouts-follow", "1")
    write_shard(tmp_path / "short", info, shards[0])
    short = fails(patched, steps_on(policy, tmp_path / "short", 2, *more))
    assert "error: " in short
    assert "rollout 8 did not come within 1 s; it has 8 rollouts" in short

    write_shard(tmp_path / "split", info, shards[0][:6])
    write_shard(tmp_path / "split", info, shards[0][6:])
    split = fails(patched, steps_on(policy, tmp_path / "split", 1, *more))
    assert "shard-00001" in split
    assert "began in an earlier shard" in split


@pytest.mark.slow
def test_a_policy_is_checked_when_its_first_rollout_is_used(patched, policy, tmp_path):
    info, shards = parts(policy)
    write_shard(tmp_path / "s", info, shards[0])
    foreign = replace(info, router_fingerprint=("0" * 16,) * len(info.moe_layers))
    write_shard(tmp_path / "s", foreign, shards[1])
    follow = ("--rollouts-follow", "1")
    patched.run(train, 1, steps_on(policy, tmp_path / "s", 1, *follow), timeout_s=120)
    text = fails(patched, steps_on(policy, tmp_path / "s", 2, *follow))
    assert "sampled from another policy" in text
    anyone = ("--rollouts-policy", "any")
    patched.run(train, 1, steps_on(policy, tmp_path / "s", 2, *anyone), timeout_s=120)
    old = fails(patched, steps_on(policy, tmp_path / "s", 2, *anyone, "--rollouts-max-lag", "0"))
    assert "policy version 0, which is more than --rollouts-max-lag 0 behind version 1" in old


def overwritten_while_training(rank: int, argv: list[str], store: str) -> None:
    """Train; at the second micro-batch the middle third of each shard is overwritten."""
    from demo.pretrain import datasets, forward_step

    calls: list[int] = []

    def before_forward(*_: Any) -> None:
        calls.append(1)
        for shard in Path(store).glob("*.safetensors") if len(calls) == 2 else ():
            size = shard.stat().st_size // 3
            with shard.open("r+b") as file:
                file.seek(size)
                file.write(bytes(size))

    sys.argv = ["pretrain.py", *argv]
    launch.train(
        datasets, forward_step, lambda models: models[0].register_forward_pre_hook(before_forward)
    )


def test_a_store_that_changes_while_it_is_trained_on_ends_the_training_with_one_line(
    patched: TreeWorker, policy: Policy, tmp_path: Path
) -> None:
    store = stores(policy, tmp_path)
    argv = steps_on(policy, store, 10)
    with pytest.raises(RankError) as failure:
        patched.run(overwritten_while_training, 1, argv, str(store), timeout_s=120)
    assert "SystemExit: 1" in str(failure.value)
    (line,) = {line for line in str(failure.value).splitlines() if line.startswith("error: ")}
    assert str(store / "shard-0000") in line
    assert "while it is in use" in line
