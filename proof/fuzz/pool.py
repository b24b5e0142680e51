"""Tries in forked processes, which may die: a worker that died or hangs is replaced by another."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from proof.fuzz.outcome import BAD_MESSAGE, CRASH, FAULTS, HANG, Kind, Verdict, noted

_FORK = multiprocessing.get_context("fork")  # a worker inherits what was prepared


@dataclass(frozen=True)
class Result:
    """A try: its number, what was wrong with its input, and the verdict on it."""

    number: int
    what: str
    verdict: Verdict


def run_tries(
    kind: Kind, numbers: Sequence[int], seed: int, jobs: int, keep: Path
) -> Iterator[Result]:
    """Make these tries, and yield their results in the order in which the tries end.

    Args:
        kind: the class of the tries.
        numbers: which tries; a number and the seed decide everything about a try.
        seed: see `numbers`.
        jobs: how many processes.
        keep: the folder to which the bad input of every fault is moved.
    """
    with tempfile.TemporaryDirectory(prefix="r3-fuzz-") as temporary:
        shared = Path(temporary) / "shared"
        shared.mkdir()
        state = kind.prepare(shared)
        todo = iter(numbers)
        workers: dict[Connection, _Worker] = {}
        try:
            for index in range(min(jobs, len(numbers))):
                worker = _Worker(kind, state, seed, Path(temporary) / str(index))
                workers[worker.connection] = worker
                worker.give(next(todo))
            while workers:
                first = min(worker.deadline for worker in workers.values())
                ready = wait([*workers], max(0.0, first - time.monotonic()))
                late = [w.connection for w in workers.values() if time.monotonic() > w.deadline]
                for connection in {*ready, *late}:
                    worker = workers.pop(connection)  # type: ignore[arg-type]
                    result, alive = worker.take()
                    if result.verdict.outcome in FAULTS:
                        _keep(worker.folder, keep / f"{kind.name}-{seed}-{result.number}", result)
                    yield result
                    number = next(todo, None)
                    if number is None or not alive:
                        worker.end()
                    if number is None:
                        continue
                    if not alive:
                        worker = _Worker(kind, state, seed, worker.place)
                    workers[worker.connection] = worker
                    worker.give(number)
        finally:
            for worker in workers.values():
                worker.end()


def _keep(folder: Path, target: Path, result: Result) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    shutil.move(folder, target)
    (target / "fault.txt").write_text(f"{result.what}\n{result.verdict}\n{result.verdict.detail}\n")


class _Worker:
    """A forked process that makes one try after the other.

    Attributes:
        place: the folder of the worker; `folder` in it is the one of the current try.
        connection: takes the numbers of tries, and gives verdicts.
        deadline: when the current try counts as hanging.
    """

    def __init__(self, kind: Kind, state: Any, seed: int, place: Path) -> None:
        self.kind, self.place, self.folder = kind, place, place / "try"
        place.mkdir(exist_ok=True)
        self.connection, theirs = _FORK.Pipe()
        self.process = _FORK.Process(target=_serve, args=(kind, state, seed, place, theirs))
        self.process.start()
        theirs.close()
        self.deadline = 0.0
        self.number = -1

    def give(self, number: int) -> None:
        """Begin this try."""
        self.number, self.deadline = number, time.monotonic() + self.kind.limit_s
        self.connection.send(number)

    def take(self) -> tuple[Result, bool]:
        """The result of the current try, and whether the worker still lives."""
        try:
            if self.connection.poll():
                return Result(self.number, noted(self.folder), self.connection.recv()), True
            verdict = Verdict(HANG, f"no end in {self.kind.limit_s:g} s")
        except EOFError:
            self.process.join()
            code = self.process.exitcode or 0
            by = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            verdict = Verdict(CRASH, f"the process ended by {by}\n{_output(self.place)[:3000]}")
        return Result(self.number, noted(self.folder), verdict), False

    def end(self) -> None:
        """End the worker and all processes that it started."""
        assert self.process.pid is not None  # it was started
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # `_serve` made a group of its own
        self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(kind: Kind, state: Any, seed: int, place: Path, connection: Connection) -> None:
    os.setsid()
    descriptor = os.open(place / "output", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(descriptor)
    warnings.simplefilter("always")
    most = _virtual_memory() + (kind.memory_mb << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    folder = place / "try"
    parent = os.getppid()
    while True:
        while not connection.poll(5):
            if os.getppid() != parent:  # the parent was killed: nobody will ask again
                return
        number = connection.recv()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            verdict = kind.attempt(random.Random(f"{seed} {kind.name} {number}"), folder, state)
        except BaseException:  # SystemExit too: it would end the process of a user
            verdict = Verdict(CRASH, traceback.format_exc(limit=-8).strip())
        said = _output(place)
        if said:
            os.ftruncate(descriptor, 0)
            if verdict.outcome not in FAULTS:
                verdict = Verdict(BAD_MESSAGE, f"beside it, this was printed: {said[:3000]!a}")
        connection.send(verdict)


def _output(place: Path) -> str:
    return (place / "output").read_text(errors="replace")


def _virtual_memory() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")
