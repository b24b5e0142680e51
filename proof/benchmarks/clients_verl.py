"""The ways to replay inside verl's own engine: verl's calls, and `replaying` in their place.

`forward_backward_batch` and `forward_step` are verl's in every way. verl and Megatron are imported
only inside the functions.

Shape suffixes (docs/glossary.md): L, T, K, S, B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from megatron_r3 import MicrobatchRoutes, ModelRoutes, RouteArrays, replaying
from proof.benchmarks.clients_model import EXPERTS, LAYERS, SAMPLES, TOGETHER, Batch
from proof.benchmarks.clients_ways import Moved
from proof.fidelity.clients.verl_engine import bare_engine, jagged, trainer_batch

ForwardStep = Callable[..., Any]


class InVerl:
    """A step of verl's engine.

    Args:
        batch: of this rank; its routes are read at the first step.
        chunk: the model.
        way: "live", "verl" (its own calls, on whatever hooks the routers have), "native" or
            "native, plan".
        on_forward: called before each forward pass.
        on_loss: called between a forward pass and its backward pass.
    """

    def __init__(self, batch: Batch, chunk: Any, way: str, on_forward: Any, on_loss: Any) -> None:
        from verl.workers.engine.megatron import transformer_impl as impl

        self.batch, self.chunk, self.replays = batch, chunk, way == "verl"
        self.on_forward, self.on_loss, self.moved = on_forward, on_loss, Moved()
        mode = "R3" if self.replays else "disabled"
        self.engine = bare_engine(impl, [chunk], mode, replays=self.replays)
        theirs = self.engine.forward_step
        if way.startswith("native"):
            routes = ModelRoutes(chunk, plan="plan" in way)
            self.engine.forward_step = natively(theirs, routes, self._observe)
        else:
            self.engine.forward_step = observed(theirs, self._observe)
        self._takes_routes, self._data = way != "live", None

    def step(self) -> float:
        """Forward and backward passes of all micro-batches; returns the sum of the losses."""
        if self._data is None:
            routes = [torch.from_numpy(ids_TLK) for ids_TLK in self.batch.routes]
            self._data = trainer_batch(
                self.batch.tokens,
                self.batch.responses,
                routes if self._takes_routes else None,
                TOGETHER,
                self.replays,
            )
        output = self.engine.forward_backward_batch(self._data, self._loss)
        return float(sum(output["loss"]))

    def _observe(self, routes: torch.Tensor | None) -> None:
        self.on_forward()
        if routes is not None:  # `batch.to(device)` in verl's forward step copies all of it
            self.moved.num_bytes += routes.values().nbytes

    def _loss(self, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        self.on_loss()
        log_probs = model_output["log_probs"]
        values = log_probs.values() if log_probs.is_nested else log_probs
        return (values.reshape(-1) * data["loss_mask"].values()).sum() / SAMPLES, {}


def observed(theirs: ForwardStep, observe: Callable[[Any], None]) -> ForwardStep:
    """verl's forward step, and a word before it."""

    def forward_step(batches: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        batch = next(batches)
        observe(batch.get("routed_experts", None))
        return theirs(iter([batch]), *args, **kwargs)

    return forward_step


def natively(
    theirs: ForwardStep, model_routes: ModelRoutes, observe: Callable[[Any], None]
) -> ForwardStep:
    """verl's forward step inside `replaying`; it has no routes, and asks no router for anything."""

    def forward_step(batches: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        batch = next(batches)
        observe(None)
        with replaying(routes_of(batch, model_routes)):
            rest = batch.exclude("routed_experts")
            return theirs(iter([rest]), *args, **kwargs)

    return forward_step


def routes_of(batch: Any, model_routes: ModelRoutes) -> MicrobatchRoutes:
    """The routes of a micro-batch of verl's, which is on the host still.

    Rows follow tokens through verl's own packing, so that context parallelism and padding are
    verl's too. A row is numbered from 1 on that way, since verl pads with zeros.
    """
    from verl.models.mcore.util import preprocess_thd_engine

    routes, lengths = batch["routed_experts"], batch["input_ids"].offsets().diff().tolist()
    ids_LTK = routes.values().numpy().transpose(1, 0, 2)
    source = RouteArrays(ids_LTK, EXPERTS, range(LAYERS))
    # as verl's R3 mask: no route for the last token, nor for a sample without a response
    counts = (routes.offsets().diff() * (batch["response_mask"].sum(-1) > 0)).tolist()
    numbers = [np.zeros(length, np.int64) for length in lengths]
    for row, first, count in zip(numbers, routes.offsets().tolist(), counts, strict=False):
        row[:count] = np.arange(first, first + count) + 1
    rows_S, *_ = preprocess_thd_engine(jagged([torch.from_numpy(row) for row in numbers]))
    rows_BS = rows_S.reshape(1, -1) - 1
    return model_routes.microbatch(source, rows_BS)
