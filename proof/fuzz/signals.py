"""Tries with signals: any signal at any moment to the real `rollouts collect`, then the rest.

A collection that a signal ends has stored whole groups, and its exit status is 128 plus the number
of the signal. The same command again then takes exactly the samples that are missing.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from megatron_r3.data.store import RolloutStore
from proof.fuzz.command import ended, from_tests, start
from proof.fuzz.outcome import BAD_MESSAGE, CRASH, HANG, SILENT, Fault
from proof.fuzz.search import Kind, Machine, Tries

_WORKERS = 8
LIMIT_S = 30.0
_ON_THE_WAY = 3 * _WORKERS  # requests that the server may still get after a signal was sent
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL)
# how much of what is missing is answered when the signal comes; None: it comes as Python starts
_MOMENTS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, None)
_PAUSES = st.floats(0, 0.05)


def prepare(shared: Path) -> ModuleType:
    """The server of the unit tests, which answers with recorded responses."""
    # `nohup`, or a shell's &, has these ignored, and then the collection ignores them too
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    return from_tests("engine_server")


class Collection(Machine):
    """A collection that is interrupted, perhaps again, and then ends.

    Attributes:
        server: the sampler, which counts what it is asked.
        command: the arguments of the collection.
    """

    def __init__(self, tries: Tries, state: ModuleType) -> None:
        super().__init__(tries, state)
        self._closing = ExitStack()
        self.close = self._closing.close

    @initialize(
        prompts=st.sampled_from((40, 14, 9, 4)),
        n=st.sampled_from((2, 4, 6)),
        shard_size=st.sampled_from((1, 7, 1000)),
        delay=st.floats(0.002, 0.04),
    )
    def begin(self, prompts: int, n: int, shard_size: int, delay: float) -> None:
        """Start a server, and write the prompts."""
        self.prompts, self.n, self.shard_size = prompts, n, shard_size
        self.state.write_inputs(self.folder, prompts)
        engine = self.state.engine(lambda body, nth: "ok", delay=delay)
        self.server = self._closing.enter_context(engine)
        sizes = ["--concurrency", str(_WORKERS), "--shard-size", str(shard_size)]
        self.command: list[str] = self.state.command(self.server.url, n, *sizes)

    @rule(
        number=st.sampled_from(_SIGNALS),
        moment=st.sampled_from(_MOMENTS),
        pause=_PAUSES,
        again=st.none() | _PAUSES,
    )
    def interrupt(
        self, number: signal.Signals, moment: float | None, pause: float, again: float | None
    ) -> None:
        """Collect, send a signal, or two of them, and look at how it ends and what is stored."""
        asked, answered = self.server.asked.total(), self.server.answered.total()
        missing = self.prompts * self.n - _num_stored(self.folder)
        process = start(self.command, self.folder, "first")
        try:
            if moment is not None:
                enough = answered + missing * moment

                def ready() -> bool:
                    has_asked = self.server.asked.total() > asked
                    return has_asked and bool(self.server.answered.total() >= enough)

                wait_until(ready, process)
            time.sleep(pause if moment is not None else 20 * pause)
            begun = self.server.asked.total() > asked
            whole = self.server.answered.total() - answered >= missing
            asked = self.server.asked.total()
            process.send_signal(number)
            if again is not None:
                time.sleep(again)
                process.send_signal(number)
            status = ended(process, LIMIT_S, f"after {number.name} it")
        finally:
            process.kill()
            process.wait()
        error = (self.folder / "first.err").read_text(errors="replace")
        judge_end(number, status, error, begun, whole, again is not None)
        # 8 workers may have asked just now, or ask once more before they look at the signal
        more = self.server.asked.total() - asked
        if more > _ON_THE_WAY:
            what = f"it went on: {more} requests after the signal {number.name}, status {status}"
            raise Fault(SILENT, f"{what}: {error[-1500:]}")
        self.look_at_groups()

    def look_at_groups(self) -> None:
        """Whether the store, if there is one, is right and has whole groups alone."""
        if not _num_stored(self.folder) or self.shard_size < self.n:
            return
        for shard in RolloutStore([self.folder / "store"]).shards:
            _, counts = np.unique(shard.tensors["group"], return_counts=True)
            if (counts != self.n).any():
                found = f"groups of {counts.tolist()}, not {self.n}"
                raise Fault(SILENT, f"{shard.path.name} has {found}")

    def finish(self) -> None:
        """Collect the rest."""
        store = self.folder / "store"
        before = {path: path.read_bytes() for path in store.glob("shard-*.safetensors")}
        status = ended(start(self.command, self.folder, "last"), LIMIT_S, "the same command again")
        if status:
            error = (self.folder / "last.err").read_text(errors="replace")
            raise Fault(SILENT, f"the same command again ends with {status}: {error[-1500:]}")
        odd = [path.name for path, data in before.items() if path.read_bytes() != data]
        odd += [path.name for path in store.iterdir() if not path.name.startswith("shard-")]
        if odd:
            raise Fault(SILENT, f"files that the same command again changed or left: {odd}")
        try:
            self.state.check_store(store, self.prompts, self.n)
        except AssertionError as error:
            raise Fault(SILENT, f"the store is not what was asked for: {error!r:.500}") from None

    def teardown(self) -> None:
        """Close the server."""
        try:
            super().teardown()
        finally:
            self.close()


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait until `ready()`, or until the process has ended; a fault if that takes LIMIT_S."""
    end = time.monotonic() + LIMIT_S
    while not ready() and process.poll() is None:
        if time.monotonic() > end:
            raise Fault(HANG, "the collection does not go on")
        time.sleep(0.001)


def _num_stored(folder: Path) -> int:
    """How many rollouts the store has, all of which must be right."""
    if not any((folder / "store").glob("shard-*.safetensors")):
        return 0
    store = RolloutStore([folder / "store"])
    store.verify()
    return len(store)


def judge_end(
    number: signal.Signals, status: int, error: str, begun: bool, whole: bool, twice: bool
) -> None:
    """A fault if the documentation does not promise this end of an interrupted collection.

    Args:
        number, twice: the signal, and whether it came twice.
        status, error: how the collection ended, and what it said.
        begun, whole: whether it had asked the server before the signal, and had all it wanted.
    """
    allowed = {-number} if number == signal.SIGKILL else {128 + number}
    if twice or not begun:  # a second signal ends it at once, and so does one while Python starts
        allowed |= {-number, 1} if not begun else {-number}
    if whole or status == 0:  # it may have ended before the signal came: the store will tell
        allowed |= {0, -number}
    if status not in allowed:
        outcome = CRASH if "Traceback" in error else SILENT
        raise Fault(outcome, f"exit status {status}, not {sorted(allowed)}: {error[-1500:]}")
    lines = error.splitlines()
    odd: Any = "Traceback" in error or len(lines) > 3 or not all(x.isprintable() for x in lines)
    if begun and status == 128 + number:
        odd |= not any("interrupted" in line for line in lines)
    if begun and odd:
        raise Fault(BAD_MESSAGE, f"it says, at status {status}: {error[-1500:]!a}")


KIND = Kind("signals", 8, prepare, machine=Collection, steps=3)
