"""A store that grows while several ranks train on it: one looks, all hear. Real processes.

The test writes the shards and tells each rank by its standard input what to do next, so nothing
here depends on how long something takes.

Shape suffixes (docs/glossary.md): N.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stored import make_rollout
from training_arguments import MODEL, options_of

from megatron_r3.data.store import RolloutStore, StoreInfo, write_shard
from megatron_r3.train import announce, refuse
from megatron_r3.train.one_look import Place
from megatron_r3.train.open_store import open_store
from proof.fidelity.rig.rank_process import RankError, RankProcess

ENDS_S = 60.0  # how long an answer may take on a busy machine
UNSTAMPED = StoreInfo(16, 4, (1, 2, 5), "vllm", "0.30.0")


class Tokens(torch.utils.data.Dataset):
    """What a worker of a dataloader reads: its process, how many rollouts it knows, the tokens."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def __getitem__(self, rollout: int) -> tuple[int, int, list[int]]:
        self.store.wait_for(rollout)
        # two processes on one connection would now and then take each other's answers
        assert self.store._arrivals._client[0] == os.getpid()
        return os.getpid(), len(self.store), self.store.fields(rollout)["tokens"].tolist()


class Follower:
    """What a rank can be told to do; each method is a command."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def wait(self, rollout: int) -> None:
        self.store.wait_for(rollout)

    def read(self, rollout: int) -> list[int]:
        tokens: list[int] = self.store.fields(rollout)["tokens"].tolist()
        return tokens

    def fork(self, *rollouts: int) -> None:
        loader: Any = torch.utils.data.DataLoader(
            *(Tokens(self.store), None, None, list(rollouts)),
            num_workers=1,
            prefetch_factor=1,
            multiprocessing_context="fork",
        )
        self.worker = iter(loader)

    def of_worker(self) -> list[object]:
        process, rollouts, tokens = next(self.worker)
        assert process != os.getpid()
        return [rollouts, tokens]

    def leave(self) -> None:  # a peer that is gone ends a process of gloo's by SIGABRT
        torch.distributed.destroy_process_group()

    def ask_anew(self) -> None:
        """As a process that has no connection yet."""
        announce.ANSWER_S = 1.0
        self.store._arrivals._client = None
        self.store.wait_for(10**6)


def follow(count: int, folder: Path, follow_s: float, commands: Connection, rank: int) -> None:
    """A rank: open the store, and do what comes through the pipe."""
    refuse.SILENCE_S = 1.0
    rendezvous = torch.distributed.FileStore(str(folder.parent / "rendezvous"), count)
    torch.distributed.init_process_group("gloo", store=rendezvous, rank=rank, world_size=count)
    seen: dict[str, Any] = {"open": [], "listdir": 0}
    opened, listed = os.open, os.listdir

    def count_open(path: Any, *more: Any, **named: Any) -> int:
        if str(path).endswith(".safetensors"):
            seen["open"].append(os.path.basename(path))
        return opened(path, *more, **named)

    def count_listdir(path: Any = ".") -> list[Any]:
        seen["listdir"] += str(path) == str(folder)
        return listed(path)

    arguments = {**MODEL, "rollouts": [str(folder)], "rollouts_follow": follow_s}
    options = options_of(**arguments, moe_router_replay=False)
    os.open, os.listdir = count_open, count_listdir
    store = open_store(options, Place(rank, count, 0, 1, 1))
    follower = Follower(store)
    commands.send({"rollouts": len(store)})
    while True:
        name, *given = commands.recv()
        said: dict[str, Any] = {}
        try:
            said["result"] = getattr(follower, name)(*given)
        except ValueError as error:
            said["error"] = str(error)
        said |= {"rollouts": len(store), "names": store.index.names(), **seen}
        said |= {"identities": store.index.identities(), "groups": store.groups().tolist()}
        commands.send(said)


class Ranks:
    """Ranks that have opened a store together, and do what they are told.

    Args:
        folder: of the store.
        count: how many.
        follow_s: how long each waits for a shard.
    """

    def __init__(self, folder: Path, count: int, follow_s: float) -> None:
        self.commands: list[Connection] = []
        self.processes: list[RankProcess] = []
        for rank in range(count):
            ours, theirs = Pipe()
            fn = partial(follow, count, folder, follow_s, theirs)
            env = {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
            log = folder.parent / f"rank{rank}.log"
            self.processes.append(RankProcess(fn, rank, 0, env, log, ENDS_S))
            self.commands.append(ours)
            theirs.close()

    def begun(self) -> Ranks:
        """Wait until all of them have opened the store."""
        for rank in range(len(self.processes)):
            self._answer(rank)
        return self

    def _answer(self, rank: int) -> dict[str, Any]:
        ours, ends = self.commands[rank], self.processes[rank].pipe
        ready = wait([ours, ends], ENDS_S)
        assert ready, f"rank {rank}: no answer in {ENDS_S} s"
        if ours not in ready:
            self.processes[rank].result()  # raises what ended it
        answer: dict[str, Any] = ours.recv()
        return answer

    def tell(self, rank: int, *command: object) -> None:
        """Have a rank do something, and go on here."""
        self.commands[rank].send(command)

    def ask(self, rank: int, *command: object) -> dict[str, Any]:
        """What a rank says when it has done something."""
        self.tell(rank, *command)
        return self._answer(rank)

    def ask_all(
        self, *command: object, meanwhile: Callable[[], Any] = lambda: None
    ) -> list[dict[str, Any]]:
        """What all ranks say when they have done something, all at once."""
        for rank in range(len(self.processes)):
            self.tell(rank, *command)
        meanwhile()
        return [self._answer(rank) for rank in range(len(self.processes))]

    def end(self) -> None:
        for process, commands in zip(self.processes, self.commands, strict=True):
            process.end()
            commands.close()


Begin = Callable[..., Ranks]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Begin so many ranks on the store."""
    begun: list[Ranks] = []

    def begin(count: int = 2, follow_s: float = 20) -> Ranks:
        begun.append(Ranks(tmp_path / "s", count, follow_s))
        return begun[-1]

    yield begin
    for ranks in begun:
        ranks.end()


def write(folder: Path, number: int) -> Path:
    """A shard of two rollouts."""
    rollouts = [make_rollout(20 + i, 2 * number + i, group=number, sample=i) for i in range(2)]
    return write_shard(folder, UNSTAMPED, rollouts)


def tokens_of(rollout: int) -> list[int]:
    return make_rollout(20 + rollout % 2, rollout).tokens_N.tolist()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "s", 0)
    return tmp_path / "s"


def shard(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def test_all_ranks_hear_of_the_same_shards_and_one_looks(folder: Path, begin: Begin) -> None:
    ranks = begin(3).begun()

    def grow() -> None:
        for number in range(1, 4):
            write(folder, number)

    told = ranks.ask_all("wait", 7, meanwhile=grow)
    whole = RolloutStore([folder])
    for one in told:
        assert one["names"] == [shard(number) for number in range(4)]
        assert one["identities"] == whole.index.identities()
        assert one["rollouts"] == 8
        assert one["groups"] == whole.groups().tolist()
    first, second, third = told
    assert sorted(first["open"]) == whole.index.names()
    assert first["listdir"] > 1
    for one in (second, third):
        assert (one["open"], one["listdir"]) == ([], 0)
    # what the first rank has opened to look at it, it does not open again to read it
    assert ranks.ask(0, "read", 4)["result"] == tokens_of(4)
    assert ranks.ask(0, "read", 0)["open"] == first["open"]
    # a rank opens what it reads, and nothing else
    assert ranks.ask(1, "read", 4)["result"] == tokens_of(4)
    assert ranks.ask(1, "read", 5)["open"] == [shard(2)]
    assert ranks.ask(1, "read", 1)["open"] == [shard(2), shard(0)]
    assert ranks.ask(2, "read", 7)["open"] == [shard(3)]
    assert ranks.ask(1, "wait", 7)["listdir"] == 0


def test_a_forked_worker_of_a_dataloader_hears_too(tmp_path: Path, begin: Begin) -> None:
    """Of a store that is not there yet when the ranks begin."""
    ranks, folder = begin(), tmp_path / "s"
    write(folder, 0)
    ranks.begun()
    write(folder, 1)
    ranks.ask(1, "wait", 3)  # the process that is forked has a connection of its own
    ranks.ask(1, "fork", 4, 5, 7)
    ranks.tell(1, "of_worker")
    write(folder, 2)
    assert ranks._answer(1)["result"] == [6, tokens_of(4)]
    told = ranks.ask(1, "of_worker")
    assert told["result"] == [6, tokens_of(5)]
    assert told["rollouts"] == 4  # it has not asked itself
    assert ranks.ask(1, "wait", 5)["rollouts"] == 6  # and its connection is still good
    write(folder, 3)
    assert ranks.ask(1, "of_worker")["result"] == [8, tokens_of(7)]
    told = ranks.ask(1, "wait", 7)
    assert (told["rollouts"], told["open"], told["listdir"]) == (8, [], 0)


def damaged(folder: Path, number: int) -> Path:
    """A shard with a byte of its header changed, moved into the store at once."""
    elsewhere = folder.parent / "elsewhere"
    for earlier in range(number):
        write(elsewhere, earlier)
    path = write(elsewhere, number)
    data = bytearray(path.read_bytes())
    place = data.index(b"megatron-r3 rollouts")
    data[place] ^= 1
    path.write_bytes(data)
    return path.rename(folder / path.name)


def test_a_damaged_head_of_a_new_shard_ends_all_ranks(folder: Path, begin: Begin) -> None:
    ranks = begin().begun()

    def grow() -> None:
        write(folder, 1)
        damaged(folder, 2)

    for one in ranks.ask_all("wait", 4, meanwhile=grow):
        assert one["error"].startswith(f"{folder / shard(2)}: ")
        assert "the header is damaged" in one["error"]
        assert one["names"] == [shard(0), shard(1)]
    # whoever asks again hears it again; what came before can still be read
    for one in ranks.ask_all("wait", 4):
        assert one["error"].startswith(f"{folder / shard(2)}: ")
    assert ranks.ask(1, "read", 3)["result"] == tokens_of(3)


def test_a_damaged_head_of_the_first_shard_ends_all_ranks(tmp_path: Path, begin: Begin) -> None:
    (tmp_path / "s").mkdir()
    path = damaged(tmp_path / "s", 0)
    ranks = begin()
    for process in ranks.processes:
        with pytest.raises(RankError, match="SystemExit: 1"):
            process.result()
    outputs = [process.log.read_text() for process in ranks.processes]
    assert [line for line in outputs[0].splitlines() if line.startswith(f"error: {path}: ")]
    assert "error:" not in outputs[1]


def gap(folder: Path, number: int) -> None:
    """Shard `number`, with the shard before it missing."""
    elsewhere = folder.parent / "elsewhere"
    for earlier in range(number + 1):
        path = write(elsewhere, earlier)
    path.rename(folder / path.name)


def test_a_gap_names_the_shard_that_is_missing(folder: Path, begin: Begin) -> None:
    ranks = begin(follow_s=1).begun()
    gap(folder, 2)
    for one in ranks.ask_all("wait", 2):
        assert one["error"] == (
            f"{folder}: rollout 2 did not come within 1 s; it has 2 rollouts, {shard(1)} is missing"
            f" and {shard(2)} is there: is the sampler still running?"
        )
    (folder.parent / "elsewhere" / shard(1)).rename(folder / shard(1))
    for one in ranks.ask_all("wait", 5):
        assert one["names"] == [shard(number) for number in range(3)]
    # and what is not missing any more is not named
    for one in ranks.ask_all("wait", 6):
        assert "it has 6 rollouts: is the sampler still running?" in one["error"]


def test_a_gap_that_was_there_at_the_first_look(folder: Path, begin: Begin) -> None:
    gap(folder, 2)
    for one in begin(follow_s=1).begun().ask_all("wait", 2):
        assert f"it has 2 rollouts, {shard(1)} is missing and {shard(2)} is there" in one["error"]


def test_a_first_rank_that_is_gone_does_not_answer(folder: Path, begin: Begin) -> None:
    ranks = begin().begun()
    write(folder, 1)
    ranks.ask_all("wait", 3)
    ranks.ask_all("leave")
    ranks.processes[0].end()
    for command in (("wait", 4), ("wait", 4), ("ask_anew",)):
        said = ranks.ask(1, *command)["error"]
        assert said.startswith("the first rank, at 127.0.0.1, which looks for new shards, does not")
        assert said.endswith("did it end?")
    assert ranks.ask(1, "read", 3)["result"] == tokens_of(3)


# -- which rank reads which shard


def readers(
    first_rollout: np.ndarray, data_size: int, peers: int, micro_batch: int
) -> dict[int, tuple[int, int]]:
    """The data-parallel rank and peer that reads each shard, which must be one."""
    found: dict[int, tuple[int, int]] = {}
    for data in range(data_size):
        for peer in range(peers):
            for number in Place(data, data_size, peer, peers, micro_batch).shards(first_rollout):
                assert number not in found
                found[number] = data, peer
    assert sorted(found) == [*range(len(first_rollout) - 1)]
    return found


def test_the_example_of_the_docstring() -> None:
    found = readers(np.arange(0, 13, 3), data_size=4, peers=2, micro_batch=1)
    assert found == {0: (0, 0), 1: (3, 1), 2: (3, 0), 3: (2, 1)}


@pytest.mark.parametrize("micro_batch", [1, 2, 5])
@pytest.mark.parametrize("peers", [1, 2, 8])
@pytest.mark.parametrize("data_size", [1, 3, 16])
def test_each_shard_is_read_by_one_rank_that_uses_it(data_size, peers, micro_batch):
    for per_shard in ([1], [2], [7], [64], [3, 1, 12, 5]):
        counts = np.resize(per_shard, 150)
        first_rollout = np.concatenate([[0], np.cumsum(counts)])
        found = readers(first_rollout, data_size, peers, micro_batch)
        for number, (data, _) in found.items():
            rollouts = range(first_rollout[number], first_rollout[number + 1])
            # the samples in the order of the store, a micro-batch to each rank in turn
            assert data in {rollout // micro_batch % data_size for rollout in rollouts}


def test_all_ranks_have_something_to_read() -> None:
    """Also where a shard has as many rollouts as a step: each begins with the same rank."""
    found = readers(np.arange(0, 64 * 400 + 1, 64), data_size=16, peers=4, micro_batch=2)
    shares = [[*found.values()].count((data, peer)) for data in range(16) for peer in range(4)]
    assert min(shares) > 0
    assert max(shares) <= 2 * 400 / 64 + 2
