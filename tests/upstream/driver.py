"""Megatron-LM's own MoE unit tests on a tree and on a patched copy: each must end alike on both.

    python -m tests.upstream.driver --megatron DIR [--ranks 1 2 4] [--only TEXT ...]
        [--out FILE.json]

DIR is a checkout of Megatron-LM with its tests; what is committed in it is tested. Its tests are
for GPUs: many cannot pass on a CPU, without Transformer Engine, or with so few ranks; those must
fail on both. Exit status 0: tests passed, and no outcome differs.
"""

from __future__ import annotations

import argparse
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
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fidelity.rig.rank_process import RankError, RankTimeout
from fidelity.rig.worker import TreeWorker
from fidelity.trees import patched_copy, unpatched_copy

FOLDER = Path("tests/unit_tests/transformer/moe")
DOWNLOADER = "tests.test_utils.python_scripts.download_unit_tests_dataset"
OUTCOMES = ("passed", "skipped", "failed", "error", "hung", "died")  # the worst comes last
TEST_S = 60  # what a test may take before it counts as hung
BATCH = 25  # tests of one set of ranks: some leave process groups and their threads behind
COLUMNS = " ".join(f"{name:>7}" for name in OUTCOMES)
HEAD = f"{'':48} {'unpatched':{len(COLUMNS)}}   patched\n{'file':42} ranks {COLUMNS}   {COLUMNS}"

Outcomes = dict[str, tuple[str, str]]  # of each test id: how it ended, and why
Row = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Run the files that were asked for on both trees."""
    doc = str(__doc__).splitlines()[0]
    parser = argparse.ArgumentParser(prog="tests.upstream.driver", description=doc)
    parser.add_argument("--megatron", type=Path, required=True, help="a Megatron-LM checkout")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="how many")
    parser.add_argument("--only", nargs="+", default=[""], help="files with one of these in them")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="upstream-") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        tree, name = unpatched_copy(args.megatron, folder / "unpatched")
        found = sorted(path.name for path in (tree / FOLDER).glob("test_*.py"))
        files = [file for file in found if any(text in file for text in args.only)]
        if not files:
            parser.error(f"{args.megatron} has no such tests in {FOLDER}")
        trees = {"unpatched": tree, "patched": patched_copy(tree, folder / "patched")}
        suites = {
            label: Suite(stack.enter_context(TreeWorker(path, ["megatron.training"])), folder)
            for label, path in trees.items()
        }
        rows = run(suites, files, args.ranks, args.out)
    total = len({test for row in rows for test in row["unpatched"]})
    passes = sum(_counts(row["unpatched"])["passed"] for row in rows)
    differ = sum(len(row["differ"]) for row in rows)
    print(f"{total} tests of {name}: {passes} passes unpatched, {differ} outcomes differ patched")
    return 1 if differ or not passes else 0


def run(
    suites: dict[str, Suite], files: list[str], ranks: list[int], out: Path | None
) -> list[Row]:
    """The rows of some files, printed and written as they come: one tree after the other."""
    print(HEAD, flush=True)
    rows: list[Row] = []
    for world_size in ranks:
        for file in files:
            begin = time.monotonic()
            row: Row = {"file": file, "ranks": world_size}
            row |= {label: suite.run(file, world_size) for label, suite in suites.items()}
            row["differ"] = differing(row["unpatched"], row["patched"])
            print(f"{_line(row)}   {time.monotonic() - begin:.0f} s", flush=True)
            for test in row["differ"]:
                print(f"  {test}\n{_why(row, test, 'unpatched')}\n{_why(row, test, 'patched')}")
            rows.append(row)
            if out:
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def differing(unpatched: Outcomes, patched: Outcomes) -> list[str]:
    """The ids that ended otherwise on one of the trees, or only exist there."""
    return sorted(
        test
        for test in unpatched.keys() | patched.keys()
        if unpatched.get(test, ("",))[0] != patched.get(test, ("",))[0]
    )


def read_records(files: Iterable[Path]) -> tuple[list[str], Outcomes]:
    """What the ranks' Recorders wrote: the ids they began with, and those that all have ended.

    A test's outcome is the worst that it had on a rank.
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
        worker: of the tree.
        folder: for records and what tests write.
    """

    def __init__(self, worker: TreeWorker, folder: Path) -> None:
        self.worker, self.folder = worker, folder

    def run(self, file: str, world_size: int) -> Outcomes:
        """How each test of a file ended. Fresh ranks go on after a batch, or one that hangs."""
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
    """Of the test in which the ranks ended: out of time, or otherwise."""
    late = isinstance(error, RankTimeout) or "Timeout (0:" in error.text
    return "hung" if late else "died"


def as_rank(rank: int, tree: Path, file: str, folder: Path, done: Collection[str]) -> None:
    """On one rank: run a file's tests with pytest, as torchrun would, without those `done`."""
    import pytest

    os.chdir(tree)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    dist.init_process_group = _with_gloo(dist.init_process_group)
    # its conftest.py would fetch data sets, which these tests do not read, into /opt
    downloader: Any = sys.modules.setdefault(DOWNLOADER, ModuleType(DOWNLOADER))
    downloader.download_and_extract_asset = lambda assets_dir: None
    options = ["-p", "no:cacheprovider", "-p", "no:faulthandler", "-o", "addopts=", "-s", "-q"]
    options += ["-W", "ignore", "--tb=short", f"--basetemp={folder / f'rank{rank}'}"]
    world_size = int(os.environ["WORLD_SIZE"])
    files = [folder / f"rank{r}.jsonl" for r in range(world_size)]
    # upstream's test objects end with a barrier: only where all ranks stand, not when gc likes
    gc.freeze()
    gc.disable()
    recorder = Recorder(files, rank, done, _tidy_up)
    status = pytest.main([*options, str(FOLDER / file)], plugins=[recorder])
    if not recorder.records.exists():
        raise RuntimeError(f"pytest ended with {status!r} before it had any test")


def _with_gloo(init: Callable[..., None]) -> Callable[..., None]:
    """`init_process_group`, of gloo whatever is asked for."""

    def with_gloo(
        backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any
    ) -> None:
        init("gloo", *args, **kwargs)

    return with_gloo


def _tidy_up() -> None:
    """End the objects of the last test, and groups that Megatron dropped: their threads poll."""
    from megatron.core import parallel_state

    gc.collect()
    if dist.is_initialized() and not parallel_state.model_parallel_is_initialized():
        for group in list(distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)


class Recorder:
    """A pytest plugin that writes how each test ended, as it ends; the ranks keep step.

    Without that, a rank whose test failed would go on to the next, and answer there to the
    collectives of the others: how that ends is chance.

    Args:
        files: where each of the ranks writes.
        rank: this one.
        done: ids of tests to leave out.
        between: called before a test, when all ranks have ended the one before.
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
        """A file that cannot be imported has no tests: it stands for itself."""
        if report.failed:
            self._write({"id": report.nodeid, "outcome": "error", "why": _reason(report)})

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave out what is done, say what is to come, and begin with a batch of it."""
        items[:] = [item for item in items if item.nodeid not in self.done]
        self._write([item.nodeid for item in items])
        del items[BATCH:]

    def pytest_runtest_logstart(self) -> None:
        """Wait for the others, then let the test begin; one that hangs says where, and ends all."""
        while any(_count_lines(peer) < self._lines for peer in self._peers):
            time.sleep(0.005)
        self._end = OUTCOMES[0], ""
        faulthandler.dump_traceback_later(TEST_S, exit=True, file=2)
        self.between()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the worst of set-up, call and tear-down."""
        outcome = report.outcome
        if outcome == "failed" and report.when != "call":
            outcome = "error"
        if OUTCOMES.index(outcome) > OUTCOMES.index(self._end[0]):
            self._end = outcome, _reason(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """The test has ended."""
        faulthandler.cancel_dump_traceback_later()
        self._write({"id": nodeid, "outcome": self._end[0], "why": self._end[1]})

    def _write(self, record: object) -> None:
        with self.records.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self._lines += 1


def _reason(report: Any) -> str:
    """What an error says, or why a test was skipped, in a line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash:
        return crash.message.partition("\n")[0][:300]
    text = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
    return str(text).strip().rpartition("\n")[2][:300]


def _count_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _counts(outcomes: Outcomes) -> Counter[str]:
    return Counter(outcome for outcome, _ in outcomes.values())


def _line(row: Row) -> str:
    head = f"{row['file']:42} {row['ranks']:>5}"
    for label in ("unpatched", "patched"):
        counts = _counts(row[label])
        head += " " + " ".join(f"{counts[name] or '-':>7}" for name in OUTCOMES) + "  "
    return head + (f" DIFFER: {len(row['differ'])}" if row["differ"] else " same")


def _why(row: Row, test: str, label: str) -> str:
    outcome, why = row[label].get(test, ("not reached", ""))
    return f"    {label}: {outcome} {why.strip()}"


if __name__ == "__main__":
    from tests.upstream import driver as upstream  # the ranks import `as_rank` by this name

    sys.exit(upstream.main())
