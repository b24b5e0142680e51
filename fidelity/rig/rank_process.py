"""One forked rank: how it is started, what it does, and how its result comes back."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn

import torch

from megatron_r3.cpu.errors import RankError

TAIL = 4000  # characters of a rank's log in an error
_load_from_bytes = torch.storage._load_from_bytes  # torch's own, before Megatron is imported


class RankProcess:
    """A forked process that calls a function, and the pipe that its result comes through.

    Args:
        fn: what the rank does with its number.
        rank: its number.
        group: the process group to join; 0: a new one.
        env: more environment variables.
        log: the file that its output goes to.
        stacks_after_s: when it writes its stacks to the log, if it is still running.
    """

    def __init__(
        self,
        fn: Callable[[int], Any],
        rank: int,
        group: int,
        env: Mapping[str, str],
        log: Path,
        stacks_after_s: float,
    ) -> None:
        self.rank, self.log = rank, log
        self.pipe, its_end = Pipe()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            with suppress(BaseException):  # nothing of the parent's may run on in the child
                os.setpgid(0, group)
                die_with_parent(parent)
                self.pipe.close()
                _redirect_output(log, stacks_after_s)
                os.environ.update(env)
                _be_rank(fn, rank, its_end)
            os._exit(1)
        self.group = group or self.pid
        with suppress(OSError):  # both sides do it, so that it is done when either goes on
            os.setpgid(self.pid, self.group)
        its_end.close()
        self.reaped = False

    def result(self) -> Any:
        """What the rank returned; call it when the pipe is readable.

        Raises:
            RankError: it raised, or ended without a result.
        """
        try:
            done, value = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.reaped = True
            how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
            raise RankError(self.rank, f"no result: {how}{self.log_tail()}") from None
        if not done:
            raise RankError(self.rank, f"{value}{self.log_tail()}")
        return value

    def log_tail(self) -> str:
        """The end of the rank's log, under a headline; or its stacks, innermost calls first."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        printed, late, stacks = text.partition("Timeout (")
        text = printed[-TAIL:] + late + stacks[:TAIL]
        return f"\n--- log of rank {self.rank}\n{text.strip()}" if text.strip() else ""

    def end(self) -> None:
        """Kill the process, if it still runs, and reap it."""
        self.pipe.close()
        if not self.reaped:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.reaped = True


def die_with_parent(parent: int) -> None:
    """Have Linux kill this process when its parent is gone, however it went."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _redirect_output(log: Path, stacks_after_s: float) -> None:
    """Send what is printed, here or in C++, to the log; the stacks too, if it hangs."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    faulthandler.enable(descriptor)
    faulthandler.dump_traceback_later(stacks_after_s, exit=False, file=descriptor)


def _be_rank(fn: Callable[[int], Any], rank: int, pipe: Connection) -> NoReturn:
    """Call `fn`, send what came of it, and stay until all ranks are done."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # the parent's OpenMP threads are not here: wait for none of them
    try:
        answer = to_bytes((True, _result(fn, rank)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc().strip()))
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(answer)
    with suppress(EOFError, OSError):
        pipe.recv_bytes()  # rank 0 has the store of the process groups: the others may need it
    os._exit(0)


def to_bytes(value: Any) -> bytes:
    """The pickle of a rank's result; Megatron's hook would make reading a tensor need Megatron."""
    torch.storage._load_from_bytes = _load_from_bytes
    return pickle.dumps(value)


def _result(fn: Callable[[int], Any], rank: int) -> Any:
    """What `fn` returns; a script that ends with sys.exit(0) has done well."""
    try:
        return fn(rank)
    except SystemExit as end:
        if end.code in (None, 0):
            return None
        raise
