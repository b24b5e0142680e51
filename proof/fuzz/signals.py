"""Tries with signals: any signal at any moment to the real `rollouts collect`, then the rest.

A collection that a signal ends has stored whole groups, and its exit status is 128 plus the number
of the signal. The same command again then takes exactly the samples that are missing.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from megatron_r3.data.store import RolloutStore
from proof.fuzz.command import from_tests, start
from proof.fuzz.outcome import BAD_MESSAGE, CRASH, HANG, RIGHT, SILENT, Kind, Verdict, note

_WORKERS = 8
LIMIT_S = 30.0
_ON_THE_WAY = 3 * _WORKERS  # requests that the server may still get after a signal was sent
SIGNALS = (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL)


def prepare(shared: Path) -> ModuleType:
    """The server of the unit tests, which answers with recorded responses."""
    return from_tests("engine_server")


class _Fault(Exception):
    """A fault of the collection; `verdict` says which."""

    def __init__(self, outcome: str, detail: str) -> None:
        super().__init__(detail)
        self.verdict = Verdict(outcome, detail)


def attempt(rng: random.Random, folder: Path, server_of_tests: ModuleType) -> Verdict:
    """Collect, send signals, look at the store, and collect the rest."""
    prompts, n = rng.choice((rng.randint(4, 14), 40)), rng.choice((2, 4, 6))
    shard_size, number = rng.choice((1, 7, 1000)), rng.choice(SIGNALS)
    server_of_tests.write_inputs(folder, prompts)
    seen: list[Any] = []

    def behave(body: dict[str, Any], nth: int) -> str:
        seen.append(body)
        return "ok"

    with server_of_tests.engine(behave, delay=rng.uniform(0.002, 0.04)) as server:
        sizes = ["--concurrency", str(_WORKERS), "--shard-size", str(shard_size)]
        command = server_of_tests.command(server.url, n, *sizes)
        process = start(command, folder, "first")
        try:
            begun = wait_for_a_moment(rng, process, server, prompts * n, seen)
            whole = server.answered.total() >= prompts * n
            late = "as it starts" if not begun else "when all is answered" if whole else "at work"
            note(folder, f"{number.name}: {late}, after {server.answered.total()} answers")
            twice = rng.random() < 0.1
            asked = server.asked.total()
            _send(process, number, rng.uniform(0, 0.05) if twice else None)
            status = _ended(process, folder, number, begun, whole, twice)
            more = server.asked.total() - asked
            if more > _ON_THE_WAY:
                lost = f"it went on: {more} requests after the signal, exit status {status}"
                return Verdict(SILENT, lost)
            shards = _stored(folder, n, shard_size)
            _resume(command, folder, shards)
        except _Fault as fault:
            return fault.verdict
        finally:
            process.kill()
            process.wait()
    try:
        server_of_tests.check_store(folder / "store", prompts, n)
    except AssertionError as error:
        return Verdict(SILENT, f"the store is not what was asked for: {error!r:.500}")
    return Verdict(RIGHT)


def wait_for_a_moment(
    rng: random.Random, process: subprocess.Popen[bytes], server: Any, total: int, seen: list[Any]
) -> bool:
    """Wait for a random moment; return whether the collection has asked the server by then."""
    if rng.random() < 0.15:
        time.sleep(rng.uniform(0, 1.5))
        return bool(seen)
    answers = rng.choice((0, rng.randrange(total), rng.randrange(total), total))
    wait_until(lambda: bool(seen) and server.answered.total() >= answers, process)
    time.sleep(rng.choice((0, rng.uniform(0, 0.05))))
    return bool(seen)


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait until `ready()`, or until the process has ended; a fault if that takes LIMIT_S."""
    end = time.monotonic() + LIMIT_S
    while not ready() and process.poll() is None:
        if time.monotonic() > end:
            raise _Fault(HANG, "the collection does not go on")
        time.sleep(0.001)


def _send(process: subprocess.Popen[bytes], number: int, again: float | None) -> None:
    process.send_signal(number)
    if again is not None:
        time.sleep(again)
        process.send_signal(number)


def _ended(
    process: subprocess.Popen[bytes],
    folder: Path,
    number: signal.Signals,
    begun: bool,
    whole: bool,
    twice: bool,
) -> int:
    """The exit status; raises a fault if the documentation does not promise this end."""
    try:
        status = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        raise _Fault(HANG, f"{number.name} did not end it in {LIMIT_S:g} s") from None
    error = (folder / "first.err").read_text(errors="replace")
    allowed = {-number} if number == signal.SIGKILL else {128 + number}
    if twice or not begun:  # a second signal ends it at once, and so does one while Python starts
        allowed |= {-number, 1} if not begun else {-number}
    store = folder / "store"
    if whole or (status == 0 and store.exists()):  # it may have finished before the signal came
        allowed |= {0, -number}
    if status not in allowed:
        outcome = CRASH if "Traceback" in error else SILENT
        raise _Fault(outcome, f"exit status {status}, not {sorted(allowed)}: {error[-1500:]}")
    lines = error.splitlines()
    if begun and (
        "Traceback" in error or len(lines) > 3 or not all(x.isprintable() for x in lines)
    ):
        raise _Fault(BAD_MESSAGE, f"it says {error[-1500:]!a}")
    if begun and status == 128 + number and not any("interrupted" in line for line in lines):
        raise _Fault(BAD_MESSAGE, f"no word of an interruption: {error[-1500:]!a}")
    return status


def _stored(folder: Path, n: int, shard_size: int) -> dict[str, bytes]:
    """The bytes of each shard by its name; raises a fault if a shard or a group is not whole."""
    paths = sorted((folder / "store").glob("shard-*.safetensors"))
    for path in paths[:1]:
        store = RolloutStore([path.parent])
        store.verify()
        for shard in store.shards if shard_size >= n else ():
            _, counts = np.unique(shard.tensors["group"], return_counts=True)
            if (counts != n).any():
                raise _Fault(SILENT, f"{shard.path.name} has groups of {counts.tolist()}, not {n}")
    return {path.name: path.read_bytes() for path in paths}


def _resume(command: list[str], folder: Path, before: dict[str, bytes]) -> None:
    process = start(command, folder, "second")
    try:
        status = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise _Fault(HANG, f"the same command again does not end in {LIMIT_S:g} s") from None
    if status:
        error = (folder / "second.err").read_text(errors="replace")
        raise _Fault(SILENT, f"the same command again ends with {status}: {error[-1500:]}")
    for name, data in before.items():
        if (folder / "store" / name).read_bytes() != data:
            raise _Fault(SILENT, f"the same command again changed {name}")
    odd = [path.name for path in (folder / "store").iterdir() if not path.name.startswith("shard-")]
    if odd:
        raise _Fault(SILENT, f"files are left in the store: {odd}")


KIND = Kind("signals", 8, 150.0, 4096, prepare, attempt)
