"""One rank looks at a store, and all others open what they read: two processes, counted."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from stored import INFO, make_rollout
from training_arguments import MODEL, options_of

from megatron_r3.data.store import RolloutStore, write_shard
from megatron_r3.train import refuse
from megatron_r3.train.one_look import Place
from megatron_r3.train.open_store import open_store
from proof.fidelity.rig.rank_process import RankError, RankProcess

SHARDS = 6


def open_and_read(
    folder: Path, rendezvous: Path, data_size: int, reads: list[int], rank: int
) -> dict[str, Any]:
    """A rank of two: open the store, read rollouts, and tell what both looked at."""
    refuse.SILENCE_S = 3.0
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(rendezvous), 2), rank=rank, world_size=2
    )
    seen: dict[str, Any] = {"open": [], "listdir": 0, "stat": 0, "fstat": 0}
    opened, listed, fstat, stat = os.open, os.listdir, os.fstat, os.stat

    def count_open(path: Any, *more: Any, **named: Any) -> int:
        if str(path).endswith(".safetensors"):
            seen["open"].append(os.path.basename(path))
        return opened(path, *more, **named)

    def count(name: str, real: Callable[..., Any], *given: Any, **named: Any) -> Any:
        seen[name] += 1
        return real(*given, **named)

    options = options_of(**MODEL, rollouts=[str(folder)], moe_router_replay=False)
    os.open, os.listdir = count_open, partial(count, "listdir", listed)
    os.stat, os.fstat = partial(count, "stat", stat), partial(count, "fstat", fstat)
    store = open_store(options, Place(rank, data_size, 0, 1, 1))
    before = dict(seen, open=[*seen["open"]])
    for rollout in reads:
        store.fields(rollout)
        store.routes(store.row_ids(rollout), [0])
    os.open, os.listdir, os.stat, os.fstat = opened, listed, stat, fstat
    told = {"before": before, "after": seen, "rollouts": len(store)}
    told |= {"recorded": store.recorded_share(), "groups": store.groups().tolist()}
    return {**told, "reward": store.column("reward").tolist()}


def ranks(folder: Path, *reads: list[int], data_size: int = 2) -> list[tuple[Any, str]]:
    """Open the store in two ranks, and read rollouts: what each told, or its error; its log."""
    logs = folder.parent
    started = [
        RankProcess(
            partial(open_and_read, folder, logs / "rendezvous", data_size, rollouts),
            *(rank, 0, {"LOCAL_RANK": str(rank)}, logs / f"rank{rank}.log", 120),
        )
        for rank, rollouts in enumerate(reads or ([], []))
    ]
    try:
        return [(_told(process), process.log.read_text()) for process in started]
    finally:
        for process in started:
            process.end()


def _told(process: RankProcess) -> Any:
    assert process.pipe.poll(120), process.log_tail()
    try:
        return process.result()
    except RankError as error:
        return error.text


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Six shards of two rollouts, without a fingerprint."""
    info = INFO.__class__(16, 4, (1, 2, 5), "vllm", "0.30.0")
    for number in range(SHARDS):
        rollouts = [make_rollout(20 + i, number, group=number, sample=i) for i in range(2)]
        write_shard(tmp_path / "s", info, rollouts)
    return tmp_path / "s"


def test_one_rank_looks_and_each_opens_what_it_reads(shards: Path) -> None:
    first, second = (told for told, _ in ranks(shards, [0, 1], [0, 1, 11, 2, 3, 2]))
    assert sorted(first["before"]["open"]) == [f"shard-0000{i}.safetensors" for i in range(SHARDS)]
    assert (first["before"]["listdir"], second["before"]["listdir"]) == (1, 0)
    # the second rank has opened what it verifies, shards 1, 3 and 5, and reads shards 0, 1 and 5
    of_second = [f"shard-0000{i}.safetensors" for i in (1, 3, 5)]
    assert sorted(second["before"]["open"]) == of_second
    assert second["after"]["open"] == [*second["before"]["open"], "shard-00000.safetensors"]
    assert first["after"]["open"] == first["before"]["open"]
    assert second["after"]["stat"] == 0
    whole = RolloutStore([shards])
    for told in (first, second):
        assert told["rollouts"] == len(whole)
        assert told["recorded"] == 1.0
        assert told["groups"] == whole.groups().tolist()
        assert told["reward"] == whole.column("reward").tolist()


def test_places_that_leave_shards_unread_end_all_ranks(shards: Path) -> None:
    """A third rank would read what is left, and there is none."""
    for error, _ in ranks(shards, [], [], data_size=3):
        assert "the places of the ranks leave shards unread" in error


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[RolloutStore([path.parent]).shards[0].header.entries["routes"].end - 5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("number", [2, 3])
def test_a_damaged_shard_ends_all_ranks_with_one_message(shards: Path, number: int) -> None:
    """Shard 2 is read by the first rank, shard 3 by the second one."""
    path = shards / f"shard-0000{number}.safetensors"
    damage(path)
    (error, said), (other, silent) = ranks(shards)
    assert "SystemExit: 1" in error
    assert "SystemExit: 1" in other
    errors = [line for line in said.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert f"{path}: rollout 1: checksum of the routes of MoE layer 2 differs" in errors[0]
    assert "error:" not in silent


def test_a_store_that_only_the_first_rank_sees_ends_all(tmp_path: Path) -> None:
    (error, said), (other, silent) = ranks(tmp_path / "nothing")
    assert "SystemExit: 1" in error
    assert "SystemExit: 1" in other
    assert f"error: {tmp_path / 'nothing'}: no such rollout store" in said
    assert "error:" not in silent
