"""The ranks of several ways in lockstep: those of one way run a step, all others are blocked.

A `TreeWorker` runs one function until it returns. So the ranks of all ways that are forked from one
worker are one call of `TreeWorker.run`, in a thread of its own, and they talk to the driver through
a socket.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from proof.benchmarks.clients_ranks import Case, serve
from proof.fidelity.rig.worker import TreeWorker

START_S, STEP_S = 300.0, 120.0  # how long ranks may take to be there, and for an answer


class Ranks:
    """The ranks of all ways of one case; use it as a context manager.

    Args:
        pool: runs the calls; it needs a free thread for each worker.
        workers: by the name that `clients_ranks.WAYS` has for each.
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
        address = folder / case.name.replace(" ", "-")
        self._ranks: dict[str, list[Connection]] = {}
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(address))
            all_ranks = len(case.ways()) * case.expert_parallel
            listening.listen(all_ranks)
            self._runs: list[Future[Any]] = [
                pool.submit(
                    worker.run,
                    serve,
                    len(case.ways_of(name)) * case.expert_parallel,
                    name,
                    str(address),
                    case,
                    timeout_s=limit_s,
                )
                for name, worker in workers.items()
            ]
            listening.settimeout(1.0)
            arrived: dict[tuple[str, int], Connection] = {}
            waited = 0
            while len(arrived) < all_ranks:
                try:
                    connection = Connection(listening.accept()[0].detach())
                except TimeoutError:
                    waited += 1
                    self._raise_failures()
                    if waited > START_S:
                        raise
                    continue
                arrived[connection.recv()] = connection
        for way, rank in sorted(arrived):
            self._ranks.setdefault(way, []).append(arrived[way, rank])

    def ask(self, way: str, method: str, *arguments: list[Any]) -> list[Any]:
        """Have all ranks of a way do something, and return their answers by rank.

        Args:
            way: a name of `clients_ranks.WAYS`.
            method: of `clients_ranks.Bench`.
            arguments: of the method; each is a list with the argument for each rank.
        """
        ranks = self._ranks[way]
        for number, rank in enumerate(ranks):
            rank.send((method, *(argument[number] for argument in arguments)))
        return [self._answer(rank) for rank in ranks]

    def __enter__(self) -> Ranks:
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
