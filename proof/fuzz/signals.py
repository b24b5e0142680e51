"""Tries with signals: interrupt the real `rollouts collect` at any moment, then collect the rest.

A collection that a signal ends must have stored whole groups, and, unless it was killed, end with
status 128 plus the number of the signal. The same command again must then collect exactly the
missing samples.
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

import engine_server
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from megatron_r3.data.store import RolloutStore
from proof.fuzz.command import ended, start
from proof.fuzz.driver import PLACE, Machine
from proof.fuzz.outcome import BAD_MESSAGE, CRASH, HANG, SILENT, Fault

_WORKERS = 8
LIMIT_S = 30.0
_ON_THE_WAY = 3 * _WORKERS  # how many requests the server may still get after a signal
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL)
# When the signal comes: once this share of the missing samples is answered. None: while the
# collection's Python starts.
_MOMENTS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, None)
_PAUSES = st.floats(0, 0.05)


def prepare(shared: Path) -> ModuleType:
    """The module of the unit tests' server, which answers with recorded responses."""
    # `nohup` or a shell's & makes this process, and its children, ignore these signals
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    return engine_server


class Collection(Machine):
    """A collection that is interrupted once or several times, and then completed.

    Attributes:
        server: the made-up engine, which counts its requests and answers.
        command: the arguments of the collection.
    """

    place, prepare = PLACE / "signals", staticmethod(prepare)

    def __init__(self) -> None:
        super().__init__()
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
        """Start the collection, send it a signal once or twice, and judge its end and the store."""
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
            status = ended(process, LIMIT_S, f"after {number.name} the collection")
        finally:
            process.kill()
            process.wait()
        error = (self.folder / "first.err").read_text(errors="replace")
        judge_end(number, status, error, begun, whole, again is not None)
        # each worker may have a request on the way, or send one more before it sees the signal
        more = self.server.asked.total() - asked
        if more > _ON_THE_WAY:
            what = f"{more} requests after the signal {number.name}, status {status}"
            raise Fault(SILENT, f"{what}: {error[-1500:]}")
        self.look_at_groups()

    def look_at_groups(self) -> None:
        """Raise a Fault if a shard has part of a group, unless a group is larger than a shard."""
        if not _num_stored(self.folder) or self.shard_size < self.n:
            return
        for shard in RolloutStore([self.folder / "store"]).shards:
            _, counts = np.unique(shard.tensors["group"], return_counts=True)
            if (counts != self.n).any():
                found = f"groups of {counts.tolist()}, not {self.n}"
                raise Fault(SILENT, f"{shard.path.name} has {found}")

    def finish(self) -> None:
        """Run the same command again: it must keep all shards, and complete the store."""
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
        """Judge the run, and close the server."""
        try:
            super().teardown()
        finally:
            self.close()


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait until `ready()`, or until the process has ended; a Fault after LIMIT_S."""
    end = time.monotonic() + LIMIT_S
    while not ready() and process.poll() is None:
        if time.monotonic() > end:
            raise Fault(HANG, f"the collection got too few answers in {LIMIT_S:g} s")
        time.sleep(0.001)


def _num_stored(folder: Path) -> int:
    """How many rollouts the store has; a StoreError if `verify` refuses it."""
    if not any((folder / "store").glob("shard-*.safetensors")):
        return 0
    store = RolloutStore([folder / "store"])
    store.verify()
    return len(store)


def judge_end(
    number: signal.Signals, status: int, error: str, begun: bool, whole: bool, twice: bool
) -> None:
    """Raise a Fault if an interrupted collection ends in another way than the docs promise.

    Args:
        number: the signal.
        status: the exit status of the collection.
        error: what the collection wrote to stderr.
        begun: whether the collection had sent a request before the signal.
        whole: whether the collection had all answers before the signal.
        twice: whether the signal came twice.
    """
    allowed = {-number} if number == signal.SIGKILL else {128 + number}
    # a second signal ends the collection at once; so does a signal while its Python starts
    if twice or not begun:
        allowed |= {-number, 1} if not begun else {-number}
    # the collection may have ended before the signal came; `finish` checks the store
    if whole or status == 0:
        allowed |= {0, -number}
    if status not in allowed:
        outcome = CRASH if "Traceback" in error else SILENT
        raise Fault(outcome, f"exit status {status}, not {sorted(allowed)}: {error[-1500:]}")
    lines = error.splitlines()
    odd: Any = "Traceback" in error or len(lines) > 3 or not all(x.isprintable() for x in lines)
    if begun and status == 128 + number:
        odd |= not any("interrupted" in line for line in lines)
    if begun and odd:
        raise Fault(BAD_MESSAGE, f"exit status {status}, and stderr has: {error[-1500:]!a}")
