"""The forward step on rollouts: a batch, its routes, the policy loss.

Megatron's schedules call `RolloutStep` for each micro-batch of each model chunk. The objects that
belong to a model chunk (`_Chunk`) are made when the chunk is first used, by `RolloutStep._equip`.

Shape suffixes (docs/glossary.md): B, S, T, V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from megatron_r3.data.digest import digest_number
from megatron_r3.data.store.reader import RolloutStore
from megatron_r3.data.store.schema import StoreError
from megatron_r3.replay.layers import layers_with_gradients, local_routers, unwrapped
from megatron_r3.replay.microbatch import MicrobatchRoutes, Mode
from megatron_r3.replay.model_routes import ModelRoutes
from megatron_r3.replay.planner import Planner
from megatron_r3.replay.rank_layout import RankLayout
from megatron_r3.replay.tally import Tally
from megatron_r3.train.collection_pass import CollectionPass
from megatron_r3.train.forward import on_device, run_forward
from megatron_r3.train.guard import StepGuard
from megatron_r3.train.ledger import Ledger
from megatron_r3.train.lookahead import Lookahead, Prepared, Preparer
from megatron_r3.train.losses.loss import policy_loss, terms_of
from megatron_r3.train.losses.policy_loss import LossError
from megatron_r3.train.metrics import StepMetrics
from megatron_r3.train.mismatch import Places
from megatron_r3.train.old_pass import OldPass
from megatron_r3.train.options import RolloutOptions
from megatron_r3.train.policy_check import PolicyCheck, speaks_for_stage
from megatron_r3.train.policy_head import KeptTokens, Policy, install
from megatron_r3.train.progress import MegatronProgress
from megatron_r3.train.reference_policy import Reference
from megatron_r3.train.refuse import refuse
from megatron_r3.train.schedule import SOURCES
from megatron_r3.train.witness import DispatchWitness


@dataclass(frozen=True)
class Parts:
    """The classes that a RolloutStep makes objects of; a proof or a benchmark passes subclasses."""

    preparer: type[Preparer] = Preparer
    planner: type[Planner] = Planner
    guard: type[StepGuard] = StepGuard
    metrics: type[StepMetrics] = StepMetrics


class StepHook(Protocol):
    """What a training calls before each step and after the last step (`loop/publish.py`)."""

    def begin(self, models: list[Any], iteration: int) -> None:
        """Called on all ranks, when the checkpoint is loaded and before the passes of each step."""

    def end(self, iteration: int) -> None:
        """Called on all ranks after the last step."""


@dataclass
class _Chunk:
    """What belongs to one model chunk of this rank.

    Attributes:
        number: 0, 1, ... in the order in which chunks were first used.
        routes: makes the routes of the chunk's micro-batches; None if the store's routes do not fit
            the model.
        preparer: prepares the chunk's micro-batches.
        policies: checks the policies of the rollouts that the chunk uses.
        has_plans: whether one of the chunk's iterators brings dispatch plans already.
    """

    number: int
    routes: ModelRoutes | None
    preparer: Preparer
    policies: PolicyCheck
    has_plans: bool = False


class RolloutStep:
    """Megatron's forward step, and the check of the step before its update.

    Args:
        options: what was asked for.
        store: the rollouts.
        progress: how far the training is.
        ledger: which rollouts the training has used.
        evaluate: the script's own forward step, used for evaluation.
        observe: called with a router without a hook, and its layer number; gives the router a hook
            that compares its live choice with the recorded routes.
        hooks: called before each step, and after the last step.
        parts: the classes of which objects are made; None for the defaults of `Parts`.
        reference: the reference policy of the KL term; None without a KL term.
    """

    def __init__(
        self,
        options: RolloutOptions,
        store: RolloutStore,
        progress: MegatronProgress,
        ledger: Ledger,
        evaluate: Callable[..., Any],
        observe: Callable[[Any, int], None],
        hooks: Sequence[StepHook] = (),
        parts: Parts | None = None,
        reference: Reference | None = None,
    ) -> None:
        self.hooks, self.reference = hooks, reference
        self.options, self.store, self.progress, self.ledger = options, store, progress, ledger
        self._evaluate, self._observe = evaluate, observe
        self._parts = parts or Parts()
        self._guard = self._parts.guard(store, options.scaled_loss)
        self.metrics = self._parts.metrics(options.num_layers, options.log_file)
        self._layout = RankLayout(options.sequence_parallel)
        self.old_pass = OldPass(options, store, ledger) if options.needs_old_pass else None
        self._witness = None
        if options.verify_dispatch:
            old = None if self.old_pass is None else self.old_pass.policy
            self._witness = DispatchWitness(store, old)
        self._chunks: WeakKeyDictionary[torch.nn.Module, _Chunk] = WeakKeyDictionary()
        self._first_iteration: int | None = None

    def __call__(
        self, data_iterator: Iterator[dict[str, Tensor]], model: Any, *more: Any, **kwargs: Any
    ) -> Any:
        """Run the next micro-batch's forward pass; return the output and its loss function."""
        if not model.training:
            return self._evaluate(data_iterator, model, *more, **kwargs)
        assert not more, f"unexpected arguments of a forward step: {more} {kwargs}"
        module = unwrapped(model)
        chunk = self._chunk(module)
        try:
            prepared = self._next(data_iterator, chunk)
            chunk.policies.check(prepared.rollouts)
        except StoreError as error:
            refuse(_message_of(error))
        self.metrics.start()
        host = prepared.batch
        self._guard.add_rows(host["rows"])
        measures = self._measures() or self.options.log_file is not None
        self.metrics.measures_update |= measures
        adds_entropy = bool(self.options.loss.penalty.entropy)
        batch, policy = on_device(host), self._policy(prepared, measures, adds_entropy)
        policy.attach(batch["labels"])
        # combined 1F1B asks for the nodes of the forward pass, and runs them after this call
        forward = model.build_schedule_plan if kwargs.get("return_schedule_plan") else model
        output = run_forward(forward, batch, host, self._microbatch(chunk, prepared))
        return output, partial(self._loss, batch, host, policy)

    @property
    def passes(self) -> list[CollectionPass]:
        """The passes over each collection: of the old policy, of the reference, of both or none."""
        return [one for one in (self.old_pass, self.reference) if one is not None]

    def begin(self, models: list[Any]) -> None:
        """Call the hooks, and get what the passes find for the collection of the coming step.

        All ranks call this before the forward passes of a step.
        """
        schedule = self.options.use.schedule
        place = schedule.place(self.ledger.consumed() // schedule.batch)
        self.metrics.begins_collection = place.begins_collection
        for hook in self.hooks:
            hook.begin(models, self.progress.iteration)
        if self.old_pass is not None:
            self.old_pass.begin(models, self._old_forward)
        if self.reference is not None:
            self.reference.begin(models, self._reference_forward, place.collection)

    def _old_forward(
        self, data_iterator: Iterator[dict[str, Tensor]], model: Any
    ) -> tuple[Any, Callable[..., Any]]:
        """The forward step of the old policy's pass, which replays routes if the updates do."""
        assert self.old_pass is not None
        module = unwrapped(model)
        chunk = self._chunk(module)
        prepared = chunk.preparer.prepare(next(data_iterator), with_plan=False, for_old_pass=True)
        chunk.policies.check(prepared.rollouts)
        routes, microbatch = prepared.routes, None
        replays = self.options.replays_routes
        # OBSERVE makes a live pass order experts as the update does; fused routers do not need it.
        fused = not replays and getattr(module.config, "moe_router_fusion", False)
        if routes is not None and chunk.routes is not None and not fused:
            microbatch = chunk.routes.activate(
                routes,
                mode=Mode.REPLAY if replays else Mode.OBSERVE,
                as_with_gradients=layers_with_gradients(module),
            )
        result = self.old_pass.forward(model, prepared, self._policy(prepared), microbatch)
        if routes is not None and microbatch is not None and self.options.takes_old_routes:
            self.old_pass.policy.add_routes(torch.from_numpy(routes.rows_T), microbatch.ids)
        return result

    def _reference_forward(
        self, data_iterator: Iterator[dict[str, Tensor]], model: Any
    ) -> tuple[Any, Callable[..., Any]]:
        """The forward step of the reference's pass, always live."""
        assert self.reference is not None
        prepared = self._chunk(unwrapped(model)).preparer.prepare_live(next(data_iterator))
        return self.reference.forward(model, prepared, self._policy(prepared))

    def check(self, models: list[Any]) -> None:
        """Check a step after its last backward pass; a fault ends the training."""
        self._guard.check(models, self.progress.iteration + 1, self._digest_of_used_shards())

    def log(self, iteration: int, writer: Any, wandb_writer: Any, beside: dict[str, float]) -> str:
        """Log a step (see `StepMetrics.log`); after the last step, end the hooks."""
        text = self.metrics.log(iteration, writer, wandb_writer, beside)
        if iteration == self.progress.last_iteration:
            for hook in self.hooks:
                hook.end(iteration)
        return text

    @cached_property
    def _has_routes(self) -> bool:
        """Whether the store's routes fit the model, which --rollouts-policy any does not demand."""
        options = self.options
        return bool(options.num_experts) and not options.shape_differences(self.store.info)

    def _chunk(self, module: torch.nn.Module) -> _Chunk:
        return self._chunks.get(module) or self._equip(module)

    def _equip(self, module: torch.nn.Module) -> _Chunk:
        """Make the `_Chunk` of a model chunk, and put hooks into its routers, experts and loss."""
        options, routes = self.options, None
        routers = local_routers(module) if self._has_routes else {}
        for number, router in routers.items():
            if router.router_replay is None:  # --moe-router-replay is off
                self._observe(router, number)
        if self._has_routes:
            routes = ModelRoutes(
                module, options.use_plan, planner=self._parts.planner, live=not options.replay
            )
            if self._witness is not None:
                self._witness.attach(module, self.metrics)
        computes_loss = bool(getattr(module, "post_process", False))
        chunk = _Chunk(
            number=len(self._chunks),
            routes=routes,
            preparer=self._parts.preparer(
                self.store,
                self._layout,
                routes,
                old=None if self.old_pass is None else self.old_pass.policy,
                reads_kept=(computes_loss and self.store.info.sampling.logprobs_of == "processed"),
                replays=options.replays_routes,
            ),
            policies=PolicyCheck(options, self.store, self.ledger, routers),
        )
        self._chunks[module] = chunk
        if computes_loss:
            install(module)
        return chunk

    def _next(self, data_iterator: Any, chunk: _Chunk) -> Prepared:
        """The next micro-batch; a Lookahead prepares it if it comes from a RerunDataIterator.

        The Lookahead goes inside Megatron's RerunDataIterator, which keeps what it hands out: a
        step that is run again gets the same prepared micro-batches.

        Only the first RerunDataIterator of a chunk gets dispatch plans. With two of them, two
        threads would gather in one process group, in an order that differs from rank to rank.
        Without plans the dispatchers learn their sizes on the device.
        """
        from megatron.core.rerun_state_machine import RerunDataIterator

        if isinstance(data_iterator, RerunDataIterator) and not isinstance(
            data_iterator.iterable, Lookahead
        ):
            prepare = partial(chunk.preparer.prepare, with_plan=not chunk.has_plans)
            chunk.has_plans = True
            cancel = (lambda: None) if self.old_pass is None else self.old_pass.policy.cancel
            data_iterator.iterable = Lookahead(data_iterator.iterable, prepare, cancel)
        item = next(data_iterator)
        if isinstance(item, Prepared):
            return item
        return chunk.preparer.prepare(item, with_plan=False)

    def _microbatch(self, chunk: _Chunk, prepared: Prepared) -> MicrobatchRoutes | None:
        """The routes that the routers take, or compare with; None if they do neither."""
        routes, options = prepared.routes, self.options
        if routes is None or chunk.routes is None:
            return None
        tally = None
        if self._measures():
            # The tokens with a recorded route are watched. Of these a token is counted if its next
            # token was sampled.
            order = self._layout.router_order
            places = Places.of(prepared.batch, order)
            watched_T = routes.recorded_T
            counted_T = order(prepared.batch["loss_mask"]).bool() & watched_T
            tally = Tally(*torch.stack([counted_T, watched_T]).cuda(non_blocking=True))
        replays = options.replays_routes
        if not replays and tally is None:
            return None
        mode = Mode.REPLAY if replays else Mode.OBSERVE
        microbatch = chunk.routes.activate(routes, prepared.plan, mode=mode, tally=tally)
        self._guard.add_routes(microbatch)
        if tally is not None:
            self.metrics.add(chunk.number, microbatch, places)
            if self._witness is not None:
                source_T = self._layout.router_order(prepared.batch["source"]).numpy()
                if not replays:  # all tokens are compared with the routes of their rollouts
                    source_T = np.full_like(source_T, SOURCES.index("rollout"))
                self._witness.watch(microbatch, routes.rows_T, source_T)
        return microbatch

    def _measures(self) -> bool:
        """Whether this iteration measures the mismatch.

        The first iteration of a process does, and each iteration with a number (from 1) that
        `mismatch_interval` divides. No iteration does if `mismatch_interval` is 0.
        """
        iteration, interval = self.progress.iteration, self.options.mismatch_interval
        if self._first_iteration is None:
            self._first_iteration = iteration
        if not interval:
            return False
        return iteration == self._first_iteration or (iteration + 1) % interval == 0

    def _policy(
        self, prepared: Prepared, measures: bool = False, adds_entropy: bool = False
    ) -> Policy:
        """How the logits of a micro-batch become the distribution that the sampler drew from."""
        info, rows = self.store.info, self.options.padded_vocab_size
        kept, shape = prepared.kept, prepared.batch["labels"].shape
        is_known = info.sampling.logprobs_of == "processed"
        return Policy(
            temperature=info.sampling.temperature or 1.0 if is_known else 1.0,
            vocab_size=info.vocab_size if info.vocab_size and info.vocab_size != rows else None,
            kept=None if kept is None or not len(kept.ids_V) else KeptTokens.of(kept, shape),
            measures_entropy=measures,
            returns_entropy=adds_entropy,
        )

    def _loss(
        self, batch: dict[str, Tensor], host: dict[str, Tensor], policy: Policy, output_BS: Tensor
    ) -> Any:
        """The policy loss, validated as pretrain_gpt.py validates its own loss.

        Args:
            batch, host: the batch on the device, and on the host.
            policy: how the model computed the log-probs.
            output_BS: the model's output: minus the log-probs, and entropies if `policy` says so.
        """
        policy.check_used()
        from megatron.core.rerun_state_machine import get_rerun_state_machine

        options, entropy_BS, reference_BS = self.options, None, None
        if policy.returns_entropy:
            output_BS, entropy_BS = output_BS
        if self.reference is not None:
            reference_BS = self.reference.policy.logprobs(host["rows"]).cuda(non_blocking=True)
        old_BS = self._old_logprobs(batch, host)
        terms = terms_of(batch, output_BS, old_BS, reference_BS, entropy_BS)
        try:
            loss, count, report, update = policy_loss(
                terms, batch["reward"], options.loss, options.per_token_loss
            )
        except LossError as error:
            refuse(str(error), speaks=speaks_for_stage())
        if self.metrics.measures_update:
            self.metrics.update.add(update, options.loss.clip, policy.entropy_BS, batch, host)
        self._guard.add_loss(host, output_BS, batch["loss_mask"], loss)
        if options.validate_loss:
            for rejected, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
                get_rerun_state_machine().validate_result(
                    result=loss,
                    rejection_func=rejected,
                    message=f"found {name} in the policy loss",
                    tolerance=0.0,
                    fatal=True,
                )
        return loss, count, report

    def _old_logprobs(self, batch: dict[str, Tensor], host: dict[str, Tensor]) -> Tensor | None:
        """The old policy's log-probs `[B, S]`; None if the step's own forward pass gives them."""
        if not self.options.trainer_is_old:
            return batch["sampled_logprobs"]
        if self.old_pass is None:
            return None
        return self.old_pass.policy.logprobs(host["rows"]).cuda(non_blocking=True)

    def _digest_of_used_shards(self) -> int:
        """A 52-bit digest of the shards used up to this step; of all shards if the store is fixed.

        In a store that grows, ranks may know different numbers of shards, but the used shards must
        be the same on all ranks. The digest has 52 bits because the ranks compare it in float64,
        which is exact up to 2**53.
        """
        from megatron.core import mpu
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        store, used = self.store, len(self.store)
        if self.options.follow_s is not None:
            samples = get_num_microbatches() * self.options.micro_batch_size
            used = self.ledger.used(samples * mpu.get_data_parallel_world_size())
            try:
                store.wait_for(used - 1)  # another rank has used this rollout, so it is there
            except StoreError as error:
                refuse(str(error))
            self.ledger.note()
        identities = store.index.table["identity"][: store.shard_of_rollout(used - 1) + 1]
        return digest_number(identities.tobytes(), 52)


def _message_of(error: StoreError) -> str:
    """The message of an error that this process or a dataloader worker raised.

    torch raises a worker's exception again with the worker's whole traceback as its text:
    "Caught StoreError in DataLoader worker process 0.\\nOriginal Traceback ...\\n
    megatron_r3.data.store.schema.StoreError: DIR: rollout 8 did not come". The message is what
    follows the last "StoreError: "; the text of an error of this process is the message itself.
    """
    return str(error).strip().splitlines()[-1].rpartition("StoreError: ")[2]
