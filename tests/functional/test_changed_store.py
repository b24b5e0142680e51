"""A store that changes while it is trained on ends the training with one line, whatever changed.

Shape suffixes (docs/glossary.md): K, L, T.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training import Policy, parts, same, steps_on

from megatron_r3.data.store import write_shard
from megatron_r3.train import launch
from proof.fidelity.rig.rank_process import RankError
from proof.fidelity.rig.worker import TreeWorker


def replaced(store: Path, other: Path) -> None:
    """Each shard by rename, with another valid one of equal size."""
    for shard in sorted(store.glob("*.safetensors")):
        os.replace(other / shard.name, shard)


def overwritten(store: Path, other: Path) -> None:
    for shard in sorted(store.glob("*.safetensors")):
        with shard.open("r+b") as file:
            file.seek(shard.stat().st_size // 3)
            file.write(bytes(shard.stat().st_size // 3))


def truncated(store: Path, other: Path) -> None:
    for shard in sorted(store.glob("*.safetensors")):
        os.truncate(shard, shard.stat().st_size // 3)


def removed(store: Path, other: Path) -> None:
    shutil.rmtree(store)


REFUSED = {change.__name__: change for change in (overwritten, truncated)}
# whoever has a file open reads it on, without its name; the control changes nothing
READ_ON = {change.__name__: change for change in (replaced, removed)}
READ_ON["unchanged"] = lambda store, other: None


def changed_while_training(
    rank: int, argv: list[str], change: str, folder: str
) -> dict[str, torch.Tensor]:
    """Train; at the second micro-batch the store is changed. Returns the weights at the end."""
    from demo.pretrain import datasets, forward_step

    store, other = Path(folder) / "store", Path(folder) / "other"
    calls: list[int] = []
    trained: list[torch.nn.Module] = []

    def before_forward(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            {**REFUSED, **READ_ON}[change](store, other)

    def watch(models: list[torch.nn.Module]) -> None:
        models[0].register_forward_pre_hook(before_forward)
        trained.append(models[0])

    from megatron.training import training

    setup, watched = training.setup_model_and_optimizer, []
    launch.watch_models(lambda models: watched.append(len(models)))
    sys.argv = ["pretrain.py", *argv]
    try:
        launch.train(datasets, forward_step, watch)
    finally:
        assert watched == [1]  # two watchers wait for one training
        assert training.setup_model_and_optimizer is setup  # and none for a later one
    return {name: weight.detach().clone() for name, weight in trained[0].named_parameters()}


def two_stores(policy: Policy, folder: Path) -> Path:
    """The four parts of the policy's rollouts, twice: the other time with other routes."""
    info, shards = parts(policy)
    plain = replace(info, router_fingerprint=())
    for shard in shards:
        write_shard(folder / "store", plain, shard)
        swapped = [r.routes for r in shard]
        other = [
            replace(r, routes=replace(s, ids_LTK=s.ids_LTK[::-1].copy()))
            for r, s in zip(shard, swapped, strict=True)
        ]
        write_shard(folder / "other", plain, other)
    return folder / "store"


@pytest.mark.parametrize("change", REFUSED)
def test_a_changed_store_is_one_error(
    patched: TreeWorker, policy: Policy, tmp_path: Path, change: str
) -> None:
    argv = steps_on(policy, two_stores(policy, tmp_path), 10)
    with pytest.raises(RankError) as failure:
        patched.run(changed_while_training, 1, argv, change, str(tmp_path), timeout_s=120)
    told = str(failure.value)
    assert "SystemExit: 1" in told
    (line,) = {line for line in told.splitlines() if line.startswith("error: ")}
    assert str(tmp_path / "store" / "shard-0000") in line
    assert "while it is in use" in line


def test_a_training_reads_on_what_it_has_open(
    patched: TreeWorker, policy: Policy, tmp_path: Path
) -> None:
    """It ends as one whose store nobody touches: with the same weights."""
    ended = {}
    for change in READ_ON:
        folder = tmp_path / change
        argv = steps_on(policy, two_stores(policy, folder), 4)
        ended[change] = patched.run(
            changed_while_training, 1, argv, change, str(folder), timeout_s=120
        )
    assert same(ended["replaced"], ended["unchanged"])
    assert same(ended["removed"], ended["unchanged"])
