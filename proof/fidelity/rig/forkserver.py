"""Fork the ranks of a case from a process that has imported everything already.

The process must not have run a multi-threaded torch operation before. A fork copies no threads, so
a child could inherit a mutex that is held by a thread which it lacks, and wait forever. Calling
`torch.set_num_threads(1)` at the start of the process rules that out.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from megatron_r3.cpu.errors import lost_its_peer
from megatron_r3.cpu.ranks import describe_rank, free_port
from proof.fidelity.rig.rank_process import RankError, RankProcess, RankTimeout

# Once a rank has failed, the other ranks have this long to fail too: their error may be the cause.
GRACE_S = 1.0
STACKS_S = 0.5  # how long late ranks may take to write their stacks


def run_ranks(
    fn: Callable[[int], Any],
    world_size: int,
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    log_dir: Path | None = None,
) -> list[Any]:
    """Call `fn(rank)` in `world_size` forked processes, with torchrun's environment set.

    No process is left behind, whatever happens.

    Args:
        fn: what a rank runs; it may be a closure, and its result must pickle.
        world_size: how many ranks, all of them on this machine.
        timeout_s: seconds after which ranks that still run are killed.
        env: more environment variables for the ranks.
        log_dir: the folder for the output of the ranks, `rank0.log` and so on. With None the output
            is thrown away, except for what errors quote.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankError: a rank failed; the message has its traceback and the end of its log.
        RankTimeout: ranks were still running after `timeout_s`.
    """
    port = free_port()
    ranks: list[RankProcess] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        try:
            for rank in range(world_size):
                group = ranks[0].group if ranks else 0
                settings = {**describe_rank(rank, world_size, port), **(env or {})}
                log = Path(log_dir or scratch) / f"rank{rank}.log"
                ranks.append(RankProcess(fn, rank, group, settings, log, timeout_s))
            return _collect(ranks, timeout_s)
        finally:
            _end(ranks)


def _collect(ranks: list[RankProcess], timeout_s: float) -> list[Any]:
    """The results of all ranks. If ranks fail, raise the error that is most likely the cause."""
    results: dict[int, Any] = {}
    failures: list[RankError] = []
    waiting = {rank.pipe: rank for rank in ranks}
    deadline = time.monotonic() + timeout_s + STACKS_S
    while waiting:
        ready: list[Any] = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                results[rank.rank] = rank.result()
            except RankError as failure:
                failures.append(failure)
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures:
        raise _to_blame(failures)
    if waiting:
        raise _late([rank for rank in ranks if rank.pipe in waiting], timeout_s)
    return [results[rank.rank] for rank in ranks]


def _to_blame(failures: list[RankError]) -> RankError:
    """The failure to report: the first that is not merely a lost connection to another rank."""
    causes = [failure for failure in failures if not lost_its_peer(failure.text)]
    return (causes or failures)[0]


def _late(ranks: list[RankProcess], timeout_s: float) -> RankTimeout:
    """The error for ranks that did not end: it names them, and has the stacks of the first."""
    names = ", ".join(str(rank.rank) for rank in ranks)
    first = ranks[0]
    return RankTimeout(first.rank, f"ranks {names} ran past {timeout_s} s{first.log_tail()}")


def _end(ranks: list[RankProcess]) -> None:
    """Kill the ranks that still run, and the processes that ranks have started."""
    if ranks:  # all of them are in the process group of the first
        with suppress(ProcessLookupError):
            os.killpg(ranks[0].group, signal.SIGKILL)
    for rank in ranks:
        rank.end()
