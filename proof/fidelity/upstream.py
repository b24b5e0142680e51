"""Run Megatron-LM's own unit tests on a tree, with ranks on the CPU, and say how each test ended.

`make check` and `make upstream` compare how tests end on a tree and on a patched copy. The tests
are made for GPUs: many cannot pass on a CPU, without Transformer Engine, or with so few ranks. Such
a test must end alike on both trees.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from proof.fidelity.rig.rank_process import RankError, RankTimeout
from proof.fidelity.rig.worker import TreeWorker

FOLDER, MOE = Path("tests/unit_tests"), "transformer/moe"
DOWNLOADER = "tests.test_utils.python_scripts.download_unit_tests_dataset"
OUTCOMES = ("passed", "skipped", "failed", "error", "hung", "died")  # from good to bad
TEST_S = 60  # seconds after which a test counts as hung
# How many tests run in one set of ranks. Some tests leave process groups and their threads behind,
# so new ranks are forked after each batch.
BATCH = 25

Outcomes = dict[str, tuple[str, str]]  # of each test id: how it ended, and why


def differing(unpatched: Outcomes, patched: Outcomes) -> list[str]:
    """The ids of tests that ended differently on the two trees, or that only one tree has."""
    return sorted(
        test
        for test in unpatched.keys() | patched.keys()
        if unpatched.get(test, ("",))[0] != patched.get(test, ("",))[0]
    )


def read_records(files: Iterable[Path]) -> tuple[list[str], Outcomes]:
    """Read the files of all ranks' Recorders: the ids of the collected tests, and how tests ended.

    A test has ended once it has ended on all ranks. Its outcome is the worst one of any rank.
    """
    collected: dict[str, None] = {}
    ended: list[Outcomes] = []
    for file in files:
        lines = file.read_text().splitlines() if file.exists() else []
        ended.append({})
        for record in map(json.loads, lines):
            if isinstance(record, list):
                collected |= dict.fromkeys(record)
            else:
                ended[-1][record["id"]] = record["outcome"], record["why"]
    on_all = [test for test in ended[0] if all(test in rank for rank in ended)]
    return list(collected), {
        test: max((rank[test] for rank in ended), key=lambda end: OUTCOMES.index(end[0]))
        for test in on_all
    }


class Suite:
    """The tests of one tree.

    Args:
        worker: runs functions on ranks that have imported the tree.
        folder: takes the records, and what the tests write.
    """

    def __init__(self, worker: TreeWorker, folder: Path) -> None:
        self.worker, self.folder = worker, folder

    def run(self, file: str, world_size: int) -> Outcomes:
        """Run a file's tests; new ranks take over after a batch, a hang or a crash of a rank."""
        outcomes: Outcomes = {}
        while True:
            error: RankError | None = None
            with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
                here = Path(scratch)
                call = (as_rank, world_size, self.worker.tree, file, here, set(outcomes))
                try:
                    self.worker.run(*call, timeout_s=BATCH * TEST_S)
                except RankError as failure:
                    error = failure
                records = [here / f"rank{rank}.jsonl" for rank in range(world_size)]
                collected, ended = read_records(records)
            outcomes |= ended
            running = [test for test in collected[:BATCH] if test not in ended]
            if running and error is None:
                error = RankError(0, "not every rank has this test")
            if error:
                outcomes[running[0] if running else file] = _ending(error), error.text[-4000:]
            if outcomes.keys() >= set(collected):
                return outcomes


def _ending(error: RankError) -> str:
    """The outcome of a test whose ranks ended before the test did: "hung" or "died"."""
    late = isinstance(error, RankTimeout) or "Timeout (0:" in error.text
    return "hung" if late else "died"


def as_rank(rank: int, tree: Path, file: str, folder: Path, done: Collection[str]) -> None:
    """Run a file's tests with pytest on one rank, as torchrun would; leave out those in `done`."""
    import pytest

    os.chdir(tree)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    dist.init_process_group = _with_gloo(dist.init_process_group)
    # Upstream's conftest.py downloads data sets into /opt. The MoE tests do not read them.
    downloader: Any = sys.modules.setdefault(DOWNLOADER, ModuleType(DOWNLOADER))
    downloader.download_and_extract_asset = lambda assets_dir: None
    options = ["-p", "no:cacheprovider", "-p", "no:faulthandler", "-o", "addopts=", "-s", "-q"]
    options += ["-W", "ignore", "--tb=short", f"--basetemp={folder / f'rank{rank}'}"]
    world_size = int(os.environ["WORLD_SIZE"])
    files = [folder / f"rank{r}.jsonl" for r in range(world_size)]
    # Upstream's test objects call a barrier when they are deleted. Python's garbage collector would
    # delete them at another moment on each rank, and ranks would wait for each other. So the
    # collector is off, and `_tidy_up` deletes the objects on all ranks between two tests.
    gc.freeze()
    gc.disable()
    recorder = Recorder(files, rank, done, _tidy_up)
    status = pytest.main([*options, str(FOLDER / file)], plugins=[recorder])
    if not recorder.records.exists():
        raise RuntimeError(f"pytest ended with {status!r} before it had any test")


def _with_gloo(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap `init_process_group` so that it uses gloo, whatever backend it is asked for."""

    def with_gloo(
        backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any
    ) -> None:
        init("gloo", *args, **kwargs)

    return with_gloo


def _tidy_up() -> None:
    """Delete the objects of the last test, and destroy process groups that Megatron has dropped.

    The threads of such a group would go on polling, and take CPU time from the next tests.
    """
    from megatron.core import parallel_state

    gc.collect()
    if dist.is_initialized() and not parallel_state.model_parallel_is_initialized():
        for group in list(distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)


class Recorder:
    """A pytest plugin that writes how each test ended, and makes all ranks begin a test together.

    Otherwise a rank whose test failed would begin the next test, and the collectives of that test
    would meet those of ranks that are still in the failed one: the outcome would be random.

    Args:
        files: the file of each rank.
        rank: the number of this rank.
        done: the ids of tests to leave out.
        between: called before each test, when all ranks have ended the test before it.
    """

    def __init__(
        self,
        files: list[Path],
        rank: int,
        done: Collection[str] = (),
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self.records, self.done, self.between = files[rank], done, between
        self._peers = [file for file in files if file != self.records]
        self._lines = 0
        self._end = OUTCOMES[0], ""

    def pytest_collectreport(self, report: Any) -> None:
        """Record a test file that cannot be imported, as if it were a test."""
        if report.failed:
            self._write({"id": report.nodeid, "outcome": "error", "why": _reason(report)})

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave out the tests in `done`, record the ids of the others, and keep one batch."""
        items[:] = [item for item in items if item.nodeid not in self.done]
        self._write([item.nodeid for item in items])
        del items[BATCH:]

    def pytest_runtest_logstart(self) -> None:
        """Wait for the other ranks, then begin. A test that hangs prints its stack and exits."""
        while any(_count_lines(peer) < self._lines for peer in self._peers):
            time.sleep(0.005)
        self._end = OUTCOMES[0], ""
        faulthandler.dump_traceback_later(TEST_S, exit=True, file=2)
        self.between()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the worst outcome of set-up, call and tear-down."""
        outcome = report.outcome
        if outcome == "failed" and report.when != "call":
            outcome = "error"
        if OUTCOMES.index(outcome) > OUTCOMES.index(self._end[0]):
            self._end = outcome, _reason(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Record how the test ended."""
        faulthandler.cancel_dump_traceback_later()
        self._write({"id": nodeid, "outcome": self._end[0], "why": self._end[1]})

    def _write(self, record: object) -> None:
        with self.records.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self._lines += 1


def _reason(report: Any) -> str:
    """The first line of an error, or why a test was skipped."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash:
        return crash.message.partition("\n")[0][:300]
    text = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
    return str(text).strip().rpartition("\n")[2][:300]


def _count_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def counts(outcomes: Outcomes) -> Counter[str]:
    """How many tests ended in each way."""
    return Counter(outcome for outcome, _ in outcomes.values())


def why(outcomes: Outcomes, test: str, label: str) -> str:
    """How a test ended on the tree that is called `label`, and why."""
    outcome, reason = outcomes.get(test, ("not reached", ""))
    return f"    {label}: {outcome} {reason.strip()}"
