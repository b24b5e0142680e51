"""One forked rank: start it, run its function, bring back its result or its error."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn

import torch

TAIL = 4000  # how many characters of a rank's log an error quotes
# torch's own function: Megatron, which is imported later, replaces it
_load_from_bytes = torch.storage._load_from_bytes


class RankError(RuntimeError):
    """A rank raised, or ended without a result; the message has a traceback and the log's end.

    Attributes:
        rank: the number of the rank.
        text: the message without that number.
    """

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)  # pickle calls the class with these arguments
        self.rank, self.text = rank, text

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.text}"


class RankTimeout(RankError):
    """Ranks did not end in time; the message has the stacks of the first of them."""


class RankProcess:
    """A forked process that calls a function, and the pipe that its result comes through.

    Args:
        fn: what the rank runs; it gets the number of the rank.
        rank: the number of the rank.
        group: the process group that the rank joins. 0 makes a new group.
        env: more environment variables.
        log: the file that the output of the rank goes to.
        stacks_after_s: seconds after which the rank writes its stacks to the log, if it still runs.
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
            # no exception may leave this block: the child would run on in the parent's code
            with suppress(BaseException):
                os.setpgid(0, group)
                die_with_parent(parent)
                # no core dump: the parent would wait until gigabytes are written
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                self.pipe.close()
                _redirect_output(log, stacks_after_s)
                os.environ.update(env)
                _be_rank(fn, rank, its_end)
            os._exit(1)
        self.group = group or self.pid
        # Parent and child both set the group: it is set whichever of the two runs first.
        with suppress(OSError):
            os.setpgid(self.pid, self.group)
        its_end.close()
        self.reaped = False

    def result(self) -> Any:
        """What the rank returned; call it when the pipe is readable.

        Raises:
            RankError: the rank raised, or ended without a result.
        """
        try:
            succeeded, value = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.reaped = True
            end = signal.Signals(-status).name if status < 0 else f"exit status {status}"
            raise RankError(self.rank, f"no result: {end}{self.log_tail()}") from None
        if not succeeded:
            raise RankError(self.rank, f"{value}{self.log_tail()}")
        return value

    def log_tail(self) -> str:
        """The end of the rank's log under a headline, and its stacks if it ran too long.

        An empty log gives an empty string.
        """
        log = self.log.read_text(errors="replace") if self.log.exists() else ""
        # The stacks begin with faulthandler's "Timeout (", innermost calls first. So the end of
        # what was printed is kept, and the beginning of the stacks.
        printed, headline, stacks = log.partition("Timeout (")
        tail = (printed[-TAIL:] + headline + stacks[:TAIL]).strip()
        return f"\n--- log of rank {self.rank}\n{tail}" if tail else ""

    def end(self) -> None:
        """Kill the process if it still runs, and reap it."""
        self.pipe.close()
        if not self.reaped:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.reaped = True


def die_with_parent(parent: int) -> None:
    """Make Linux kill this process when its parent ends, for whatever reason.

    Args:
        parent: the process id of the parent, which the caller read before the fork.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        # if the parent ended before prctl, no signal will come
        if os.getppid() != parent:
            os._exit(1)


def _redirect_output(log: Path, stacks_after_s: float) -> None:
    """Redirect what Python and C++ print to the log; after `stacks_after_s` write stacks there."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    faulthandler.enable(descriptor)
    faulthandler.dump_traceback_later(stacks_after_s, exit=False, file=descriptor)


def _be_rank(fn: Callable[[int], Any], rank: int, pipe: Connection) -> NoReturn:
    """Call `fn`, send its result or its traceback, and stay until all ranks are done."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # a fork copies no threads: OpenMP would wait for threads that only the parent has
    torch.set_num_threads(1)
    try:
        answer = to_bytes((True, _result(fn, rank)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc().strip()))
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(answer)
    with suppress(EOFError, OSError):
        # The parent closes its end when all ranks are done. Rank 0 serves the store of the process
        # groups, and the other ranks may need it until then.
        pipe.recv_bytes()
    os._exit(0)


def to_bytes(value: Any) -> bytes:
    """The pickle of a rank's result.

    Megatron replaces the torch function that reads pickled tensors. The pickle of a tensor would
    name Megatron's function, and whoever reads the pickle would have to import Megatron. So torch's
    own function is put back first.
    """
    torch.storage._load_from_bytes = _load_from_bytes
    return pickle.dumps(value)


def _result(fn: Callable[[int], Any], rank: int) -> Any:
    """What `fn` returns, or None for a script that ended itself by sys.exit(0)."""
    try:
        return fn(rank)
    except SystemExit as end:
        if end.code in (None, 0):
            return None
        raise
