"""Prepare micro-batches ahead of the step, in a thread: read their routes, plan their dispatch.

Shape suffixes (docs/glossary.md): B, K, L, S, T.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from megatron_r3.data.kept import KeptSets
from megatron_r3.data.store.reader import RolloutStore
from megatron_r3.replay.host_routes import HostRoutes
from megatron_r3.replay.model_routes import ModelRoutes
from megatron_r3.replay.plan import LayerSizes
from megatron_r3.replay.rank_layout import RankLayout
from megatron_r3.train.dataset import SEQUENCE_FIELDS
from megatron_r3.train.old_policy import OldPolicy
from megatron_r3.train.schedule import SOURCES

DEPTH = 2  # how many prepared micro-batches may wait to be used
_ROLLOUT, _OLD_POLICY, _LIVE = (SOURCES.index(name) for name in SOURCES)
END_S = 2.0  # how many seconds `Lookahead.end` waits for the micro-batch that is being prepared


@dataclass(frozen=True)
class Prepared:
    """A micro-batch on the host: this rank's part of the batch, its routes, its plan.

    Attributes:
        batch: the fields that the model and the loss take.
        rollouts: the indices in the store of the whole micro-batch's rollouts.
        routes: of the chunk's layers; None where no layer replays or is compared.
        plan: the dispatch plan; None where the dispatchers have to learn their sizes on the device.
        kept: the kept sets of the labels, in the order of the batch; None where this rank's loss
            needs none.
    """

    batch: dict[str, Tensor]
    rollouts: list[int]
    routes: HostRoutes | None
    plan: dict[int, LayerSizes] | None
    kept: KeptSets | None = None


class Preparer:
    """Prepares on the host what one model chunk of this rank needs of a batch.

    Args:
        store: the rollouts.
        layout: which tokens of a batch this rank holds.
        routes: reads and plans the chunk's routes; None where no layer replays or is compared.
        old: the record of the old policy's routes, for tokens that take these routes. None if no
            pass of the old policy runs; such tokens then route live.
        reads_kept: whether the chunk's loss needs the kept sets.
        replays: whether routers take routes; else routers are live, and only compared with routes.
    """

    def __init__(
        self,
        store: RolloutStore,
        layout: RankLayout,
        routes: ModelRoutes | None,
        *,
        old: OldPolicy | None = None,
        reads_kept: bool = False,
        replays: bool = True,
    ) -> None:
        self.store, self.layout, self.routes, self.old = store, layout, routes, old
        self.reads_kept, self.replays = reads_kept, replays

    def prepare(
        self, whole: dict[str, Tensor], with_plan: bool, for_old_pass: bool = False
    ) -> Prepared:
        """This rank's part of a whole batch, with its routes and its dispatch plan.

        Args:
            with_plan: whether to plan the dispatch, where a dispatcher asks for a plan.
            for_old_pass: whether the batch is for the pass that records the old policy's routes.
        """
        live = self.prepare_live(whole)
        if self.routes is None:
            return live
        batch = live.batch
        routes = self.read_routes(batch["rows"], self.layout.mean_tokens(whole["rows"]))
        if self.replays:
            source_T = self.layout.router_order(batch["source"]).numpy()
            self._apply(source_T, routes, None if for_old_pass else int(whole["collection"].max()))
        plan = self.routes.plan(routes) if with_plan else None
        return replace(live, routes=routes, plan=plan)

    def prepare_live(self, whole: dict[str, Tensor]) -> Prepared:
        """This rank's part of a whole batch, without routes."""
        batch = self.layout.split(whole, SEQUENCE_FIELDS)
        rollouts = self.store.rollouts_of(whole["rows"].numpy())
        kept = None
        if self.reads_kept:
            kept = self.store.kept_of_next(batch["rows"].reshape(-1).numpy())
        return Prepared(batch, rollouts, None, None, kept)

    def read_routes(self, rows_BS: Tensor, mean_tokens: float) -> HostRoutes:
        """The routes of these rows in this chunk's layers.

        Args:
            mean_tokens: see `MicrobatchRoutes`.
        """
        assert self.routes is not None
        return self.routes.read(self.store, rows_BS, mean_tokens)

    def _apply(self, source_T: np.ndarray, routes: HostRoutes, collection: int | None) -> None:
        """Give each token the routes of its source.

        Args:
            source_T: indices of `SOURCES`.
            routes: the routes of the rollouts; changed in place.
            collection: the number of the micro-batch's collection. None in the pass that records
                the routes of the old policy: the tokens that will take these routes route live.
        """
        live_T = source_T != _ROLLOUT
        old_T = source_T == _OLD_POLICY
        if collection is not None and self.old is not None and old_T.any():
            assert self.routes is not None
            self.old.wait_for(collection)
            here_T = old_T & ~routes.padding_T
            for index, layer in enumerate(self.routes.layer_numbers):
                routes.ids_LTK[index, here_T] = self.old.routes(layer, routes.rows_T[here_T])
            routes.live_T[here_T] = False
            live_T = source_T == _LIVE
        routes.live_T[live_T & ~routes.padding_T] = True


_alive: WeakSet[Lookahead] = WeakSet()


@atexit.register
def end_all() -> None:
    """End the threads of all Lookaheads. Python calls this function when the process exits.

    A thread that is inside torch at that moment would be killed in the middle of C++ code, which
    aborts the process after a training that went well: "terminate called without an active
    exception", status 134.
    """
    for lookahead in list(_alive):
        lookahead.end()


class Lookahead:
    """An iterator that prepares in a thread what another iterator brings, ahead of its use.

    `RolloutStep` puts a Lookahead inside Megatron's RerunDataIterator, which keeps the prepared
    micro-batches and hands them out again if a step is run twice.

    Args:
        batches: the batches to prepare.
        prepare: prepares one batch.
        cancel: ends a wait inside `prepare`; called when the thread is to end.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        prepare: Callable[[Any], Prepared],
        cancel: Callable[[], None] = lambda: None,
    ) -> None:
        self._device = torch.cuda.current_device()
        self._cancel = cancel
        self._ending = False
        # an item is a prepared micro-batch, or the exception that ended the thread
        self._ready: queue.Queue[tuple[Prepared | None, BaseException | None]] = queue.Queue(DEPTH)
        self._thread = threading.Thread(
            target=self._run, args=(batches, prepare), name="megatron_r3 lookahead", daemon=True
        )
        _alive.add(self)
        self._thread.start()

    def end(self) -> None:
        """Have the thread end after its current micro-batch; wait for the end, at most END_S."""
        self._ending = True
        self._cancel()
        deadline = time.monotonic() + END_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            try:  # the thread may be waiting for room in the queue
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def __iter__(self) -> Lookahead:
        return self

    def __next__(self) -> Prepared:
        prepared, error = self._ready.get()
        if error is not None:
            # the thread has ended: the next call must raise the same error
            self._ready.put((None, error))
            raise error
        assert prepared is not None
        return prepared

    def _run(self, batches: Iterator[Any], prepare: Callable[[Any], Prepared]) -> None:
        try:
            torch.cuda.set_device(self._device)  # a new thread starts with device 0
            while not self._ending:
                self._ready.put((prepare(next(batches)), None))
        except BaseException as error:  # StopIteration too: the step must see the end
            self._ready.put((None, error))
