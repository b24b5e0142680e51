"""A store that grows: one rank looks, all hear; real processes, their questions counted."""

import json
import os
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from stored import INFO, make_rollout

from megatron_r3.store import StoreError, write_shard
from megatron_r3.store.follow import FollowedStore, Lookout
from megatron_r3.training.announce import Announcer
from megatron_r3.training.one_look import Place

UNSTAMPED = replace(INFO, router_fingerprint=())
PROGRAM = """
import json, os, sys
from types import SimpleNamespace
import torch
sys.path.insert(0, os.environ["SUPPORT"])
from training_arguments import ARGUMENTS
from megatron_r3.store.schema import StoreError
from megatron_r3.training import refuse
from megatron_r3.training.dataset import FollowedRollouts
from megatron_r3.training.one_look import Place
from megatron_r3.training.open_store import open_store
from megatron_r3.training.options import RolloutOptions

rank, (folder, rendezvous, wanted, workers) = int(sys.argv[1]), sys.argv[2:6]
refuse.SILENCE_S = 1.0
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.FileStore(rendezvous, 2), rank=rank, world_size=2
)
seen = {"opened": [], "listed": 0}
opened, listed = os.open, os.listdir

def count_open(path, *more, **named):
    if str(path).endswith(".safetensors"):
        seen["opened"].append(os.path.basename(path))
    return opened(path, *more, **named)

def count_list(path="."):
    seen["listed"] += str(path) == folder
    return listed(path)

os.open, os.listdir = count_open, count_list
arguments = {
    **ARGUMENTS, "rollouts": [folder], "moe_router_replay": False, "rollouts_follow": 20.0
}
options = RolloutOptions.from_args(SimpleNamespace(**arguments))
status, said = 0, ""
try:
    store = open_store(options, Place(rank, 2, 0, 1, 1))
    print("open", flush=True)
    data = FollowedRollouts(store, options.use, int(wanted))
    loader = torch.utils.data.DataLoader(
        data, batch_size=None, sampler=range(rank, int(wanted), 2), num_workers=int(workers)
    )
    rows = [sample["rows"][0].item() for sample in loader]
    if not int(workers):
        store.routes(store.row_ids(int(wanted) - 1 - rank), [0])
    store.wait_for(int(wanted) - 1)
    print(json.dumps({"rows": rows, "identities": store.index.identities(), **seen}))
except StoreError as error:
    status, said = 1, str(error)
except SystemExit as end:
    status = end.code
print(said, file=sys.stderr)
sys.stdout.flush(), sys.stderr.flush()
torch.distributed.barrier()
os._exit(status)  # a thread of gloo's may abort a process that ends by itself
"""


def start(folder: Path, wanted: int, workers: int = 0) -> list[subprocess.Popen]:
    env = {**os.environ, "SUPPORT": str(Path(__file__).parents[2] / "support")}
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    meet = str(folder.parent / "rendezvous")
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                PROGRAM,
                str(rank),
                str(folder),
                meet,
                str(wanted),
                str(workers),
            ],
            env={**env, "LOCAL_RANK": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]


def ended(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    outputs = [process.communicate(timeout=120) for process in processes]
    return [(p.returncode, *texts) for p, texts in zip(processes, outputs, strict=True)]


def write(folder: Path, number: int) -> Path:
    """A shard of two rollouts of one group."""
    rollouts = [
        replace(make_rollout(20 + i, 2 * number + i, group=number, sample=i), policy_version=number)
        for i in range(2)
    ]
    return write_shard(folder, UNSTAMPED, rollouts)


@pytest.mark.parametrize("workers", [0, 1])
def test_all_ranks_hear_of_the_same_shards(tmp_path: Path, workers: int) -> None:
    """The first shards are there at the start, the others come; a worker hears of them too."""
    folder = tmp_path / "s"
    for number in range(2):
        write(folder, number)
    processes = start(folder, 10, workers)
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
    for number in range(2, 5):
        time.sleep(0.5)
        write(folder, number)
    results = ended(processes)
    assert [status for status, _, _ in results] == [0, 0], results
    first, second = (json.loads(out) for _, out, _ in results)
    assert first["identities"] == second["identities"]
    assert len(first["identities"]) == 5
    # rollouts of 20 and 21 tokens have 19 and 20 rows: rank 0 has the even ones, rank 1 the odd
    assert first["rows"] == [0, 39, 78, 117, 156]
    assert second["rows"] == [19, 58, 97, 136, 175]
    assert first["listed"] > 2
    assert second["listed"] == 0
    if not workers:  # each shard has a rollout of each rank; a worker opens shards for itself
        assert sorted(second["opened"]) == [f"shard-0000{n}.safetensors" for n in range(5)]


def test_a_new_shard_that_is_damaged_ends_all_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    write(folder, 0)
    whole = write(tmp_path / "other", 0)
    processes = start(folder, 4)
    (folder / "shard-00001.safetensors").write_bytes(whole.read_bytes()[:-40])
    for status, _, said in ended(processes):
        assert status == 1
        assert f"{folder / 'shard-00001.safetensors'}: not a whole shard" in said


def test_what_is_waited_for_is_named_everywhere(tmp_path: Path) -> None:
    folder, other = tmp_path / "s", tmp_path / "other"
    write(folder, 0)
    for number in range(3):
        write(other, number)
    lookout = Lookout(folder)
    lookout.news()
    announcer = Announcer(lookout)
    try:
        arriving = pickle.loads(pickle.dumps(announcer.arriving))  # as a spawned worker gets it
        store = FollowedStore(folder, 2.0, arriving)
        os.link(other / "shard-00002.safetensors", folder / "shard-00002.safetensors")
        with pytest.raises(StoreError) as refusal:
            store.wait_for(0)
        assert "shard-00001.safetensors is missing and shard-00002" in str(refusal.value)
        os.link(other / "shard-00001.safetensors", folder / "shard-00001.safetensors")
        store.wait_for(3)  # the two shards that are new; the first look is not announced
        assert len(store) == 4
    finally:
        announcer.end()
    del announcer
    store.wait_s = 60.0
    with pytest.raises(StoreError, match=r"the first rank, at .*, does not answer"):
        store.wait_for(4)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (4, 2, 1), (128, 8, 1), (3, 4, 2), (16, 1, 4)])
@pytest.mark.parametrize("rollouts", [[3] * 20, [64] * 100, [1, 5, 2, 9, 64, 3] * 9])
def test_each_shard_is_read_by_one_rank_that_will_use_it(
    sizes: tuple[int, int, int], rollouts: list[int]
) -> None:
    ranks, peers, micro_batch = sizes
    first = np.concatenate([[0], np.cumsum(rollouts)])
    readers: dict[int, list[int]] = {}
    for data in range(ranks):
        for peer in range(peers):
            for shard in Place(data, ranks, peer, peers, micro_batch).shards(first):
                readers.setdefault(shard, []).append(data)
                used = range(int(first[shard]), int(first[shard + 1]))
                # Megatron hands out micro-batches to the data-parallel ranks in turn
                assert data in {rollout // micro_batch % ranks for rollout in used}
    assert sorted(readers) == list(range(len(rollouts)))
    assert all(len(by) == 1 for by in readers.values())


def test_the_example_of_place() -> None:
    first = np.arange(0, 13, 3)
    read = {
        (data, peer): Place(data, 4, peer, 2, 1).shards(first)
        for data in range(4)
        for peer in range(2)
    }
    assert {where: shards for where, shards in read.items() if shards} == {
        (0, 0): [0],
        (3, 1): [1],
        (3, 0): [2],
        (2, 1): [3],
    }
