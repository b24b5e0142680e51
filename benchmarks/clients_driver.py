"""Processes of several ways, their ranks in lockstep: one runs a step, all others are blocked.

A `TreeWorker` runs one function until it returns. So each process of a case is a call of
`TreeWorker.run` in a thread of its own, and the ranks talk to the driver through a socket.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.clients_ranks import WAYS, Case, serve
from fidelity.rig.worker import TreeWorker

START_S, STEP_S = 300.0, 120.0  # how long ranks may take to be there, and for an answer


class Processes:
    """The processes of one case; use it as a context manager.

    Args:
        pool: runs the calls; it needs a free thread for each process.
        workers: a worker for each process that has a way.
        case: of all ways.
        folder: where the socket is made.
        limit_s: seconds after which the ranks are killed.

    Raises:
        RankError: a rank failed. Any method raises it.
        TimeoutError: a rank did not answer in time.
    """

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        workers: Mapping[str, TreeWorker],
        case: Case,
        folder: Path,
        limit_s: float,
    ) -> None:
        address = folder / f"ep{case.expert_parallel}-{'full' if case.recompute else 'none'}"
        self._ranks: dict[str, list[Connection]] = {}
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(address))
            listening.listen(len(workers) * case.expert_parallel)
            self._runs: list[Future[Any]] = [
                pool.submit(
                    worker.run,
                    serve,
                    case.expert_parallel,
                    process,
                    str(address),
                    case,
                    timeout_s=limit_s,
                )
                for process, worker in workers.items()
            ]
            listening.settimeout(1.0)
            arrived: dict[tuple[str, int], Connection] = {}
            waited = 0
            while len(arrived) < len(workers) * case.expert_parallel:
                try:
                    connection = Connection(listening.accept()[0].detach())
                except TimeoutError:
                    waited += 1
                    self._raise_failures()
                    if waited > START_S:
                        raise
                    continue
                arrived[connection.recv()] = connection
        for process, rank in sorted(arrived):
            self._ranks.setdefault(process, []).append(arrived[process, rank])

    def ask(self, process: str, method: str, *arguments: list[Any]) -> list[Any]:
        """Have all ranks of a process do something, and return their answers by rank.

        Args:
            process: a process of `clients_ranks.WAYS`.
            method: of `clients_ranks.Bench`.
            arguments: of the method; each is a list with the argument for each rank.
        """
        ranks = self._ranks[process]
        for number, rank in enumerate(ranks):
            rank.send((method, *(argument[number] for argument in arguments)))
        return [self._answer(rank) for rank in ranks]

    def ask_way(self, name: str, method: str) -> list[Any]:
        """The same for a method whose argument is the name of a way."""
        process = WAYS[name].process
        return self.ask(process, method, [name] * len(self._ranks[process]))

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for connection in (rank for ranks in self._ranks.values() for rank in ranks):
            if kind is None:
                connection.send(None)
            connection.close()
        if kind is None:
            for run in self._runs:
                run.result()

    def _answer(self, rank: Connection) -> Any:
        try:
            if not rank.poll(STEP_S):
                raise TimeoutError(f"a rank did not answer in {STEP_S} s")
            return rank.recv()
        except (EOFError, ConnectionError):
            # the call whose rank has gone has the reason
            for run in wait(self._runs, STEP_S, FIRST_EXCEPTION).done:
                run.result()
            raise

    def _raise_failures(self) -> None:
        for run in self._runs:
            if run.done():
                run.result()
