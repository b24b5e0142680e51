"""Replay in Megatron's own RL loop: the old-policy pass and the update take the sampler's experts.

The loop makes batches and losses itself. This file wraps the loop's forward steps: a wrapper takes
the row ids of a micro-batch, makes the routes of this rank's layers and tokens active, and calls
the loop's step. The reference model routes live, because its weights did not sample.

Shape suffixes (docs/glossary.md): B, S, T.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from megatron_r3.data.store.schema import SamplingSettings, StoreInfo
from megatron_r3.data.store.writer import write_shard
from megatron_r3.replay.active import WHY_UNTAKEN, replaying
from megatron_r3.replay.host_routes import HostRoutes
from megatron_r3.replay.layers import layers_with_gradients, unwrapped
from megatron_r3.replay.microbatch import MicrobatchRoutes
from megatron_r3.replay.model_routes import ModelRoutes
from megatron_r3.replay.rows import PADDING
from megatron_r3.replay.tally import Tally
from megatron_r3.rl.rl_options import LoopOptions
from megatron_r3.rl.turns import TurnRoutes, read_turns
from megatron_r3.train.metrics import StepMetrics
from megatron_r3.train.mismatch import Places
from megatron_r3.train.refuse import refuse_beside_children
from megatron_r3.train.schedule import SOURCES
from megatron_r3.train.witness import DispatchWitness

ForwardStep = Callable[..., Any]
OLD, UPDATE = "old pass", "update"


class LoopReplay:
    """Replays the engine's routes in the RL loop of this process.

    Args:
        options: what was asked for.
        iteration: returns the number of the iteration that runs, from 0.
        packing: returns the loop's packing context, or None if the collection is not packed.

    Attributes:
        turns: the turns of the last collection; None before the first collection.
    """

    def __init__(
        self, options: LoopOptions, iteration: Callable[[], int], packing: Callable[[], Any]
    ) -> None:
        self.options, self._iteration, self._packing = options, iteration, packing
        self.turns: TurnRoutes | None = None
        self.metrics = {
            OLD: StepMetrics(options.num_layers, prefix=f"{OLD}: "),
            UPDATE: StepMetrics(options.num_layers),
        }
        self._pass = UPDATE
        self._witness: DispatchWitness | None = None
        self._doors: WeakKeyDictionary[torch.nn.Module, ModelRoutes] = WeakKeyDictionary()
        self._began = 0  # the iteration of the first update on the collection

    def begin_collection(self, rows: Sequence[Any], rollouts: Sequence[Any]) -> LoopReplay:
        """Read all turns of a collection, on every rank; return this object.

        Wrong turns end the run.

        Args:
            rows, rollouts: the rows and rollouts of all data-parallel ranks (see `read_turns`).
        """
        options = self.options
        try:
            first_group = self._iteration() * options.num_groups
            turns = read_turns(rows, rollouts, options.group_size, first_group)
            self.turns = TurnRoutes(options.shape, turns)
            self._refuse_missing()
            if torch.distributed.get_rank() == 0:
                self._announce()
                if options.store is not None:
                    import megatron.core

                    write_collection(options, self.turns, str(megatron.core.__version__))
        except ValueError as error:
            refuse_beside_children(str(error))
        self._forget()
        self._began = self._iteration()
        if self._witness is not None:
            self._witness.store = self.turns
        return self

    def rows(self, begin: int, end: int) -> Tensor:
        """The row ids of the turns from `begin` up to `end - 1`, not packed, int64 `[B, S]`."""
        assert self.turns is not None
        return self.turns.rows(begin, end, self.options.seq_length)

    def old_pass(self, forward_step: ForwardStep, packing: Any) -> ForwardStep:
        """The forward step of the old policy's pass, with replay.

        Args:
            packing: the loop's packing context; None where samples are not packed.
        """
        if packing is not None:
            self._check_bins(packing)

        def step(data_iterator: Any, model: Any, *more: Any, **options: Any) -> Any:
            batch, rows_BS = self._batch(next(data_iterator), packing)
            with self._replaying(OLD, model, rows_BS):
                return forward_step(iter([batch]), model, *more, **options)

        return step

    def reference_pass(self, forward_step: ForwardStep, packing: Any) -> ForwardStep:
        """The forward step of the reference model's pass, with live routing."""

        def step(data_iterator: Any, model: Any, *more: Any, **options: Any) -> Any:
            batch, _ = self._batch(next(data_iterator), packing)
            with replaying(None):
                return forward_step(iter([batch]), model, *more, **options)

        return step

    def update(self, forward_step: ForwardStep) -> ForwardStep:
        """The script's forward step, which computes the loss, with replay."""

        def step(data_iterator: Any, model: Any, *more: Any, **options: Any) -> Any:
            batch, rows_BS = self._batch(next(data_iterator), self._packing())
            with self._replaying(UPDATE, model, rows_BS):
                return forward_step(iter([batch]), model, *more, **options)

        return step

    def log(self, iteration: int, writer: Any, wandb_writer: Any) -> str:
        """Write what the last old-policy pass and the last step measured, and return it for
        Megatron's log line. All ranks call this together.

        Args:
            iteration: as Megatron counts when it logs, from 1.
            writer, wandb_writer: Megatron's writers; None on a rank without one.
        """
        lines = [m.log(iteration, writer, wandb_writer) for m in self.metrics.values()]
        self._forget()
        return "".join(lines)

    def _forget(self) -> None:
        """Drop what was measured and not logged, but remember which alarms were raised."""
        for metrics in self.metrics.values():
            metrics.microbatches, metrics.dispatched = {}, [0, 0]

    def _refuse_missing(self) -> None:
        assert self.turns is not None
        if self.options.refuse_missing and self.turns.without:
            raise ValueError(
                f"{self.turns.without[0].name}: the engine sent no routes, and "
                "--moe-router-replay-missing is error: use an agent that keeps `routes` of the "
                "responses, or give --moe-router-replay-missing live "
                f"(turns without routes: {len(self.turns.without)})"
            )
        if self.turns.turns and not self.turns.recorded_T.any():
            raise ValueError(
                "no turn of this collection has routes, so nothing would be replayed: use an agent "
                "that keeps `routes` of the responses. Agents behind a server (RemoteAgent) send "
                "no routes"
            )

    def _announce(self) -> None:
        assert self.turns is not None
        turns, recorded = self.turns, int(self.turns.recorded_T.sum())
        print(
            f"> rollouts: {len(turns.turns)} turns, {len(turns.tokens_T)} tokens to replay, "
            f"{recorded} with recorded routes; {len(turns.without)} turns without routes",
            flush=True,
        )

    def _batch(self, batch: Sequence[Tensor], packing: Any) -> tuple[list[Tensor], Tensor]:
        """The part of a batch that the loop's step reads, and the batch's row ids `[B, S]`.

        A packed batch begins with the number of a bin; any other batch ends with its row ids.
        """
        assert self.turns is not None, "a forward step of the RL loop before its first collection"
        if packing is not None:
            return [*batch], self._rows_of_bin(packing, int(batch[0]))
        *fields, rows_BS = batch
        self._check_tokens(rows_BS, fields[0])
        return fields, rows_BS

    def _rows_of_bin(self, packing: Any, number: int) -> Tensor:
        assert self.turns is not None
        info = packing.packing_info
        turns, starts = info.bin_seq_indices[number], info.seq_starts[number]
        return self.turns.rows_of_bin(turns, starts, packing.bin_size)

    @contextmanager
    def _replaying(self, which: str, model: Any, rows_BS: Tensor) -> Iterator[None]:
        """Replay a forward pass; end the run if a layer did not take its routes.

        All layers have run when the forward step ends: `refuse_in_loop` refuses the schedule that
        runs layers later.
        """
        microbatch = self._microbatch(which, model, rows_BS)
        with replaying(microbatch):
            yield
        if left := microbatch.untaken:
            refuse_beside_children(
                f"the routes of the layers {left} were given, and the forward pass took none of "
                f"them. {WHY_UNTAKEN}",
                speaks=True,
            )

    def _check_bins(self, packing: Any) -> None:
        """Refuse bins with other tokens than those of their rows; called once a collection."""
        for number, tokens_S in enumerate(packing.packed_trajs.cpu()):
            self._check_tokens(self._rows_of_bin(packing, number), tokens_S[None])

    def _check_tokens(self, rows_BS: Tensor, tokens_BS: Tensor) -> None:
        assert self.turns is not None
        try:
            self.turns.check_tokens(rows_BS, tokens_BS)
        except ValueError as error:
            refuse_beside_children(str(error), speaks=True)

    def _microbatch(self, which: str, model: Any, rows_BS: Tensor) -> MicrobatchRoutes:
        """The routes of one forward pass on this rank. All ranks call this together."""
        assert self.turns is not None
        module: Any = unwrapped(model)
        self._pass = which
        # Alarms look only at a collection's first update. The weights of later updates are not
        # those that sampled, so that their routers choose other experts without any fault of the
        # rows. Not every iteration is logged, so the first log line of a collection may be of a
        # later update.
        self.metrics[UPDATE].begins_collection = self._iteration() == self._began
        door = self._doors.get(module) or self._equip(module)
        try:
            routes = door.read(self.turns, rows_BS, door.layout.mean_tokens(rows_BS))
        except ValueError as error:
            refuse_beside_children(str(error))
        tally, places = None, None
        if self.options.measures(self._iteration()):
            tally, places = self._measured(routes)
        microbatch = door.activate(
            routes,
            door.plan(routes),
            tally=tally,
            # the old pass has no gradients, but must compute the same bits as the update
            as_with_gradients=layers_with_gradients(module) if which == OLD else (),
        )
        if places is not None:
            self.metrics[which].add(0, microbatch, places)
            if self._witness is not None:
                source_T = np.full_like(routes.rows_T, SOURCES.index("rollout"))
                self._witness.watch(microbatch, routes.rows_T, source_T)
        return microbatch

    def _equip(self, module: torch.nn.Module) -> ModelRoutes:
        door = self._doors[module] = ModelRoutes(module)
        if self.options.verify_dispatch:
            if self._witness is None:
                assert self.turns is not None
                self._witness = DispatchWitness(self.turns)
            self._witness.attach(module, self)
        return door

    def _measured(self, routes: HostRoutes) -> tuple[Tally, Places]:
        """The tally of a micro-batch, and the places of its tokens.

        All rows with a recorded route are compared with the live choice. Only the rows that predict
        a sampled token count in the mismatch.
        """
        assert self.turns is not None
        rows_T = routes.rows_T
        version_T = np.where(rows_T == PADDING, -1, self.turns.version_T[np.maximum(rows_T, 0)])
        watched_T = routes.recorded_T
        counted_T = watched_T & torch.from_numpy(version_T >= 0)
        first_T = self.turns.first_of(rows_T)
        return (
            Tally(*torch.stack([counted_T, watched_T]).cuda(non_blocking=True)),
            Places(rows_T - first_T, np.where(version_T >= 0, 0, -1), version_T),
        )

    def add_dispatched(self, matched: int, total: int) -> None:
        """Add a witness's counts to the metrics of the pass that began last."""
        self.metrics[self._pass].add_dispatched(matched, total)


def write_collection(options: LoopOptions, turns: TurnRoutes, version: str) -> Path:
    """Append the turns of a collection to the store `options.store`, a rollout for each turn.

    Turns of one rollout are samples of one group, with the reward of the rollout. The policy
    versions are the generation epochs of the loop. The router digests are left out: this process
    no longer has the weights that sampled.

    Args:
        version: the version of Megatron, the engine that sampled.

    Returns:
        The new file.

    Raises:
        ValueError: a store may not hold one of the turns, which the message names; or the store's
            directory cannot be written.
    """
    assert options.store is not None
    info = StoreInfo.of_model(
        options.shape,
        "megatron",
        version,
        vocab_size=options.vocab_size,
        sampling=SamplingSettings(**options.sampling, logprobs_of="raw"),
    )
    rollouts = [turns.rollout(number) for number in range(len(turns.turns))]
    for turn, rollout in zip(turns.turns, rollouts, strict=True):
        rollout.check(turn.name, options.vocab_size)
    return write_shard(options.store, info, rollouts)
