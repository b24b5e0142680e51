"""When a store is checked: before training, or as it is read; on ranks that are told of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from slow import slow_except
from stored import rewrite
from training import Policy, parts, same, steps_on, stores, train

from megatron_r3.data.store import RolloutStore, write_shard
from proof.fidelity.rig.rank_process import RankError
from proof.fidelity.rig.worker import TreeWorker

READS = ("--rollouts-check", "reads")
PP2 = ("--pipeline-model-parallel-size", "2")
EP2 = ("--expert-model-parallel-size", "2")


def told(patched: TreeWorker, argv: list[str]) -> str:
    with pytest.raises(RankError) as failure:
        patched.run(train, 2, argv, timeout_s=120)
    return str(failure.value)


@pytest.mark.parametrize("layout", slow_except([PP2, EP2], EP2))
def test_a_training_is_the_same_whenever_its_store_is_checked(patched, policy, tmp_path, layout):
    store = stores(policy, tmp_path, mixed=True)
    want = patched.run(train, 2, steps_on(policy, store, 3, *layout), timeout_s=120)
    got = patched.run(train, 2, steps_on(policy, store, 3, *layout, *READS), timeout_s=120)
    assert same(want, got)
    info, shards = parts(policy)
    shards[1], shards[2] = shards[2], shards[1]
    for version, shard in enumerate(shards):
        mixed = [replace(r, reward=i % 2, policy_version=version) for i, r in enumerate(shard)]
        write_shard(tmp_path / "swapped", replace(info, router_fingerprint=()), mixed)
    control = steps_on(policy, tmp_path / "swapped", 3, *layout, *READS)
    assert not same(want, patched.run(train, 2, control, timeout_s=120))


@pytest.mark.parametrize("layout", slow_except([PP2, EP2], PP2))
def test_a_wrong_expert_is_refused_before_the_step_that_would_use_it(
    patched: TreeWorker, policy: Policy, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    """In the last layer of the second shard, which the second step uses."""
    store = stores(policy, tmp_path)
    path = store / "shard-00001.safetensors"
    info = RolloutStore([store]).info
    routes = load_file(path)["routes"]
    routes[-1, 5, 0] = routes[-1, 5, 1]
    rewrite(path, routes=routes)
    layer = len(info.moe_layers) - 1
    for number, check in enumerate(((), READS)):
        saved = ("--save", str(tmp_path / str(number)), "--save-interval", "1")
        error = told(patched, steps_on(policy, store, 3, *layout, *saved, *check))
        assert f"{path}: rollout 0: an expert twice in one row at MoE layer {layer}" in error
        steps = tmp_path / str(number) / "latest_checkpointed_iteration.txt"
        # before training; or after the first step, which was right and was updated
        assert (steps.read_text() if steps.exists() else "0") == ("1" if check else "0")
