"""The forward step on rollouts: a batch, its routes, the policy loss.

Shape suffixes: B batch, S sequence of this context-parallel rank, T tokens of this rank in the
router's order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_r3.fingerprint import router_digest
from megatron_r3.replay import MicrobatchRoutes, ReplayError, replaying
from megatron_r3.seams.router import RouterHook
from megatron_r3.store.reader import RolloutStore
from megatron_r3.store.schema import StoreError
from megatron_r3.training.batch import RankBatches, packed_seq_params, read_routes
from megatron_r3.training.guard import StepGuard
from megatron_r3.training.layers import local_routers, shape_differences, unwrapped
from megatron_r3.training.ledger import Ledger
from megatron_r3.training.lookahead import Lookahead, Planner, Prepared
from megatron_r3.training.losses import agreement_sums, clipped_policy_loss
from megatron_r3.training.metrics import install_metrics
from megatron_r3.training.refuse import refuse
from megatron_r3.training.witness import DispatchWitness

HOST_FIELDS = {"rows", "cu_seqlens"}  # what the loss does not need


class RolloutStep:
    """What Megatron's schedules call for every microbatch.

    Args:
        args: Megatron's arguments.
        store: the rollouts.
        forward_step: the script's own, used for evaluation.
        ledger: which of them the training has used.
    """

    def __init__(
        self,
        args: Any,
        store: RolloutStore,
        forward_step: Callable[..., Any],
        ledger: Ledger,
    ) -> None:
        self.args, self.store, self.forward_step, self.ledger = args, store, forward_step, ledger
        self.guard = StepGuard(store, scaled=bool(getattr(args, "fp16", False)))
        self.measurable = bool(args.num_experts) and not shape_differences(args, store.info)
        self.layers: dict[int, list[int]] = {}  # by id of the model chunk
        self.planners: dict[int, Planner] = {}  # until an iterator has taken them
        self.known: dict[int, set[tuple[str, ...]]] = {}  # policies, by id of the model chunk
        self.metrics = install_metrics(args.num_layers)
        self.witness = DispatchWitness(store) if args.moe_router_replay_verify_dispatch else None
        self.first_iteration: int | None = None
        self.batches = RankBatches(args)

    def __call__(
        self, data_iterator: Iterator[dict[str, Tensor]], model: Any, *more: Any, **kwargs: Any
    ) -> Any:
        """Megatron's forward step: the output and the loss function of the next microbatch."""
        if not model.training:
            return self.forward_step(data_iterator, model, *more, **kwargs)
        assert not more, f"unexpected arguments of a forward step: {more} {kwargs}"
        chunk = unwrapped(model)
        try:
            prepared = self._next(data_iterator, chunk)
            self._check_policies(chunk, prepared.shards)
        except StoreError as error:  # from a worker it comes with its traceback
            refuse(str(error).strip().splitlines()[-1].rpartition("StoreError: ")[2])
        batch = prepared.batch
        self.guard.add_rows(batch["rows"])
        microbatch = self._microbatch(chunk, prepared)
        packed = packed_seq_params(batch)
        batch = {k: v.cuda(non_blocking=True) for k, v in batch.items() if k not in HOST_FIELDS}
        # combined 1F1B asks for the nodes of the forward pass, and runs them later
        forward = model.build_schedule_plan if kwargs.get("return_schedule_plan") else model
        try:
            with replaying(microbatch):
                output = forward(
                    batch["tokens"],
                    batch["position_ids"],
                    None,
                    labels=batch["labels"],
                    loss_mask=batch["loss_mask"],
                    packed_seq_params=packed,
                )
        except ReplayError as error:
            refuse(str(error))
        return output, partial(self._loss, batch, prepared.batch)

    def check(self, models: list[Any]) -> None:
        """Look at a step after its last backward pass; it ends training, or returns."""
        self.guard.check(models, self.args.curr_iteration + 1, self._digest_of_used_shards())

    def _digest_of_used_shards(self) -> int:
        """52 bits of the shards that hold what was used until now, in their order.

        In a store that grows ranks may know more or fewer shards; those that were used must be the
        same on all of them. 52 bits are exact in the float64 in which ranks compare them.
        """
        from megatron.core import mpu
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        store, used = self.store, len(self.store)
        if self.args.rollouts_follow is not None:
            samples = get_num_microbatches() * self.args.micro_batch_size
            used = self.ledger.consumed() + samples * mpu.get_data_parallel_world_size()
            try:
                store.wait_for(used - 1)  # it is there: some rank has used it
            except StoreError as error:
                refuse(str(error))
            self.ledger.note()
        shards = store.shards[: store.shard_of_rollout(used - 1) + 1]
        text = " ".join(shard.identity for shard in shards)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 12

    def _loss(self, batch: dict[str, Tensor], host: dict[str, Tensor], output_BS: Tensor) -> Any:
        """The policy loss, validated as pretrain_gpt.py validates its own.

        Args:
            batch, host: the batch on the device and on the host.
        """
        from megatron.core.rerun_state_machine import get_rerun_state_machine

        args = self.args
        result = policy_loss(
            batch, args.rollouts_clip_eps, args.calculate_per_token_loss, output_BS
        )
        self.guard.add_loss(host, output_BS, batch["loss_mask"], result[0])
        rejections = {torch.isnan: "NaN", torch.isinf: "Inf"}
        # where it does not rerun a step it ends it with a traceback, before `check` can say more
        validates = getattr(args, "rerun_mode", "validate_results") != "disabled"
        validates = validates and args.check_for_nan_in_loss_and_grad
        for rejected, name in rejections.items() if validates else ():
            get_rerun_state_machine().validate_result(
                result=result[0],
                rejection_func=rejected,
                message=f"found {name} in the policy loss",
                tolerance=0.0,
                fatal=True,
            )
        return result

    def _next(self, data_iterator: Any, model: Any) -> Prepared:
        """The next microbatch, prepared ahead where Megatron's own iterator brings it.

        Only the first such iterator of a chunk has plans: two of them would gather in one group,
        in an order that differs from rank to rank. From any other it comes without.
        """
        from megatron.core.rerun_state_machine import RerunDataIterator

        prepare = partial(self._prepare, self._layers_of(model))
        if isinstance(data_iterator, RerunDataIterator) and not isinstance(
            data_iterator.iterable, Lookahead
        ):
            planned = partial(prepare, planner=self.planners.pop(id(model), None))
            data_iterator.iterable = Lookahead(data_iterator.iterable, planned)
        item = next(data_iterator)
        return item if isinstance(item, Prepared) else prepare(item)

    def _prepare(
        self, layer_numbers: list[int], whole: dict[str, Tensor], planner: Planner | None = None
    ) -> Prepared:
        """What this rank needs of a batch, on the host."""
        batch = self.batches.split(whole)
        shards = self.store.shards_of(whole["rows"].numpy())
        if not self.measurable:
            return Prepared(batch, shards, None, None)
        rows_T = self.batches.router_order(batch["rows"])
        mean_tokens = self.batches.mean_tokens(whole["rows"])
        routes = read_routes(self.store, rows_T, layer_numbers, mean_tokens)
        return Prepared(batch, shards, routes, planner.plan(routes) if planner else None)

    def _microbatch(self, model: Any, prepared: Prepared) -> MicrobatchRoutes | None:
        routes = prepared.routes
        if routes is None:
            return None
        microbatch = routes.on_device(self._layers_of(model), torch.device("cuda"))
        microbatch.replay = self.args.moe_router_replay
        microbatch.plan = prepared.plan
        microbatch.verify_plan = self.args.moe_router_replay_verify_plan
        self.guard.add_routes(microbatch)
        if self._measures():
            counted_T = self.batches.router_order(prepared.batch["loss_mask"]).bool()
            counted_T = counted_T.cuda(non_blocking=True)
            live_T = microbatch.live_T
            microbatch.counted_T = counted_T if live_T is None else counted_T & ~live_T
            self.metrics.add(id(model), microbatch)
            if self.witness is not None:
                self.witness.watch(microbatch, routes.rows_T)
        if microbatch.replay or microbatch.counted_T is not None:
            return microbatch
        return None

    def _measures(self) -> bool:
        """Whether this iteration compares with live routing; the first of a run always does."""
        interval = self.args.moe_router_replay_log_mismatch_interval
        interval = self.args.log_interval if interval is None else interval
        iteration = self.args.curr_iteration
        if self.first_iteration is None:
            self.first_iteration = iteration
        if not interval:
            return False
        return iteration == self.first_iteration or (iteration + 1) % interval == 0

    def _layers_of(self, model: Any) -> list[int]:
        """The MoE layers of a model chunk; at its first call, equip it."""
        if id(model) not in self.layers:
            routers = local_routers(model)
            self.layers[id(model)] = sorted(routers)
            if self.measurable:
                for number, router in routers.items():
                    if router.router_replay is None:  # live: only observe
                        router.router_replay = RouterHook(router.config, layer_number=number)
                if self.witness is not None:
                    self.witness.attach(model, self.metrics)
            if self.measurable and routers and self._plans():
                self.planners[id(model)] = Planner(self.store.info.num_experts, sorted(routers))
        return self.layers[id(model)]

    def _plans(self) -> bool:
        """Whether there is a dispatcher that would ask for a plan."""
        args = self.args
        asks = args.moe_token_dispatcher_type in ("alltoall", "allgather")
        return bool(args.moe_router_replay and args.moe_router_replay_dispatch_plan and asks)

    def _check_policies(self, model: Any, shards: list[int]) -> None:
        """Refuse rollouts of another policy when the first of them are used, and old ones."""
        args, store = self.args, self.store
        if args.rollouts_max_lag is not None:
            store.refresh()
            newest = int(store.shards[-1].tensors["policy_version"].max())
            for shard in (store.shards[number] for number in shards):
                oldest = int(shard.tensors["policy_version"].min())
                if newest - oldest > args.rollouts_max_lag:
                    refuse(
                        f"{shard.path}: policy version {oldest} while {newest} samples: more than "
                        f"--rollouts-max-lag {args.rollouts_max_lag} behind"
                    )
        if not self.measurable or args.rollouts_policy == "any":
            return
        if id(model) not in self.known:
            self.known[id(model)] = self._used_before()
        for stamp in (store.shards[number].info.router_fingerprint for number in shards):
            if stamp and stamp not in self.known[id(model)]:
                self._check_policy(local_routers(model), stamp)
                self.known[id(model)].add(stamp)

    def _used_before(self) -> set[tuple[str, ...]]:
        """The policies whose rollouts an interrupted training, resumed here, has begun to use.

        Only rollouts of this store count: those of another one, which the checkpoint was trained
        on before, say nothing about the policy that sampled these.
        """
        store, consumed = self.store, self.ledger.consumed()
        if not consumed:
            return set()
        if self.args.rollouts_pack:  # samples are packs, and all of one policy
            return {store.info.router_fingerprint}
        if self.args.rollouts_follow is not None:
            store.wait_for(consumed - 1)
        last = store.shards_of(store.row_ids(min(consumed, len(store)) - 1))[0]
        return {shard.info.router_fingerprint for shard in store.shards[: last + 1]}

    def _check_policy(self, routers: dict[int, Any], stamped: tuple[str, ...]) -> None:
        from megatron.core import mpu

        # the ranks of a pipeline stage hold the same layers: one of them speaks for all
        same_layers = mpu.get_tensor_model_parallel_rank(), mpu.get_data_parallel_rank(True)
        for number, router in sorted(routers.items()):
            trace = self.store.info.moe_layers.index(number - 1)
            here = router_digest(router.weight)
            if here != stamped[trace]:
                refuse(
                    f"--rollouts {' '.join(self.args.rollouts)}: sampled from another policy: the "
                    f"router of layer {number} is {stamped[trace]} there, {here} here. Load the "
                    "checkpoint that sampled (--load), sample again, or, to train on other "
                    "policies' rollouts, give --rollouts-policy any",
                    speaks=same_layers == (0, 0),
                )


def policy_loss(
    batch: dict[str, Tensor], clip_eps: float, per_token: bool, output_BS: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, number of response tokens, and what to report, of one microbatch on the last stage.

    Args:
        output_BS: Megatron's loss of each token, -log p(label).
        per_token: --calculate-per-token-loss.
    """
    mask_BS = batch["loss_mask"]
    logprobs_BS = -output_BS.float()
    sampled_BS = batch["sampled_logprobs"]
    loss = clipped_policy_loss(logprobs_BS, sampled_BS, batch["advantages"], mask_BS, clip_eps)
    num_tokens = mask_BS.sum()
    sums = {
        "policy loss": loss.detach(),
        **_named(agreement_sums(logprobs_BS, sampled_BS, mask_BS)),
    }
    report = {name: torch.stack([value, num_tokens]) for name, value in sums.items()}
    reward = batch["reward"]
    report["reward"] = torch.stack([reward.sum(), torch.ones_like(reward).sum()])
    if not per_token:
        loss = loss * _share_of_cp_group(num_tokens)
    return loss, num_tokens.int(), report


def _named(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("_", " "): value for name, value in sums.items()}


def _share_of_cp_group(num_tokens: Tensor) -> Tensor:
    """Megatron divides by this rank's tokens and averages over context-parallel ranks; a response
    lies unevenly on them: weigh each rank by its share, so that the sum is the sequence's mean.
    """
    from megatron.core import mpu

    size = mpu.get_context_parallel_world_size()
    if size == 1:
        return torch.ones_like(num_tokens)
    total = num_tokens.clone()
    torch.distributed.all_reduce(total, group=mpu.get_context_parallel_group())
    return num_tokens * size / total.clamp(min=1)
