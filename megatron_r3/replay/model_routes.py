"""From row ids to the routes of one model chunk: those of its MoE layers, for this rank's tokens.

Shape suffixes (docs/glossary.md): B, S, T.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from megatron_r3.replay.active import OPTION_OFF
from megatron_r3.replay.host_routes import HostRoutes, RouteSource, read_routes
from megatron_r3.replay.layers import local_routers, unwrapped
from megatron_r3.replay.microbatch import MicrobatchRoutes, Mode
from megatron_r3.replay.plan import LayerSizes
from megatron_r3.replay.planner import PLANNED_DISPATCHERS, Planner
from megatron_r3.replay.rank_layout import RankLayout
from megatron_r3.replay.routes import MoEShape
from megatron_r3.replay.tally import Tally


class ModelRoutes:
    """Makes the routes of each micro-batch of one model chunk of this rank.

    It supports pipeline stages and virtual stages (each chunk has its own object), tensor and
    sequence parallelism, context parallelism, packed sequences and padding.

    `microbatch` does everything in one call. Training on rollouts calls the parts: `read` and
    `plan` work on the host, in a thread ahead of the forward pass, and `activate` brings the result
    to the device.

    With expert parallelism and plans the constructor is collective: all ranks that share experts
    call it in the same order, because each planner makes a process group.

    Args:
        model: a model chunk, wrapped (DDP, Float16Module) or not.
        plan: whether each micro-batch gets a dispatch plan. None: as the config says
            (`moe_router_replay_dispatch_plan`), if the dispatcher can take plans.
        planner: the class that makes the plans.
        live: True if the routers of this model route live, and are at most compared with routes.
            Then the model may have been built with `moe_router_replay` off.

    Attributes:
        layout: which tokens of a batch this rank holds; `layout.split` splits a whole batch for
            context parallelism as Megatron does.
        layer_numbers: the MoE layers of the chunk, Megatron's numbers; empty if it has none.

    Raises:
        ValueError: the chunk was built with `moe_router_replay` off, and `live` is False; or `plan`
            is True and the dispatcher takes no plans.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        plan: bool | None = None,
        *,
        planner: type[Planner] = Planner,
        live: bool = False,
    ) -> None:
        module: Any = unwrapped(model)
        routers = local_routers(module)
        config = self.config = module.config
        if routers and not config.moe_router_replay and not live:
            raise ValueError(OPTION_OFF)
        self.layer_numbers = sorted(routers)
        self.layout = RankLayout(config.sequence_parallel)
        asks = config.moe_token_dispatcher_type in PLANNED_DISPATCHERS
        if plan is None:
            plan = config.moe_router_replay_dispatch_plan and asks
        if plan and not asks:
            raise ValueError(
                f"plan=True: the dispatcher {config.moe_token_dispatcher_type!r} takes no plans; "
                f"expected one of {', '.join(PLANNED_DISPATCHERS)}"
            )
        self._planner = planner(config, self.layer_numbers) if plan and routers else None

    def microbatch(
        self,
        source: RouteSource,
        rows_BS: Tensor,
        *,
        mode: Mode = Mode.REPLAY,
        counted_BS: Tensor | None = None,
        mean_tokens: float | None = None,
        with_plan: bool = True,
    ) -> MicrobatchRoutes:
        """The routes of one forward pass, on the model's device.

        With plans this is collective: the ranks that share experts make equally many calls, in the
        same order. It may run in a thread ahead of the forward pass.

        Args:
            source: a RolloutStore, or RouteArrays.
            rows_BS: int64 on the host: for each token of this context-parallel rank's part the row
                of its route in `source`, -1 for padding. A packed batch has B = 1.
            mode: REPLAY takes the routes, OBSERVE only compares live routing with them.
            counted_BS: bool on the host: the tokens that count in the mismatch, for example those
                of responses. Tokens without a recorded route are left out. None: nothing is
                counted.
            mean_tokens: see MicrobatchRoutes; `layout.mean_tokens` works it out from the rows of
                the whole batch.
            with_plan: False leaves the plan out, for a pass that not all of the ranks that share
                experts make.

        Raises:
            ValueError: the source is for another model, `rows_BS` is no int64 tensor of two axes on
                the host, or its sequences cannot be split for sequence parallelism.
            PlanError: as `Planner.plan`.
        """
        routes = self.read(source, rows_BS, mean_tokens)
        tally = None
        if counted_BS is not None:
            counted_T = self.layout.router_order(counted_BS).bool() & routes.recorded_T
            tally = Tally(counted_T.cuda(non_blocking=True))
        plan = self.plan(routes) if with_plan else None
        return self.activate(routes, plan, mode=mode, tally=tally)

    def read(
        self, source: RouteSource, rows_BS: Tensor, mean_tokens: float | None = None
    ) -> HostRoutes:
        """Read the routes of these rows in this chunk's layers, on the host.

        Arguments and errors are those of `microbatch`.
        """
        if rows_BS.device.type != "cpu" or rows_BS.dtype != torch.int64 or rows_BS.dim() != 2:
            raise ValueError(
                "rows_BS must be an int64 tensor [B, S] on the host; got "
                f"{rows_BS.dtype} {tuple(rows_BS.shape)} on {rows_BS.device}"
            )
        self._refuse_another_model(source.info)
        rows_T = self.layout.router_order(rows_BS)
        return read_routes(source, rows_T, self.layer_numbers, mean_tokens)

    def plan(self, routes: HostRoutes) -> dict[int, LayerSizes] | None:
        """The dispatch sizes of each layer; None without plans, or if a rank has live tokens.

        It is collective among the ranks that share experts.

        Raises:
            PlanError: as `Planner.plan`.
        """
        return self._planner.plan(routes) if self._planner else None

    def activate(
        self,
        routes: HostRoutes,
        plan: dict[int, LayerSizes] | None = None,
        *,
        mode: Mode = Mode.REPLAY,
        tally: Tally | None = None,
        as_with_gradients: Collection[int] = (),
    ) -> MicrobatchRoutes:
        """A microbatch with what `read` returned, on the device; one copy, and no wait.

        Args:
            plan: the plan of these routes; OBSERVE and RECORD drop it.
            mode, tally, as_with_gradients: see MicrobatchRoutes.
        """
        return routes.on_device(
            self.layer_numbers,
            torch.device("cuda"),
            mode=mode,
            tally=tally,
            plan=plan if mode is Mode.REPLAY else None,
            verify_plan=self.config.moe_router_replay_verify_plan,
            as_with_gradients=as_with_gradients,
        )

    def _refuse_another_model(self, info: MoEShape) -> None:
        """Refuse a source that differs in experts or top-k, or lacks layers of this chunk."""
        config = self.config
        ours = (config.num_moe_experts, config.moe_router_topk)
        theirs = (info.num_experts, info.topk)
        if ours != theirs:
            raise ValueError(
                f"routes of top-{theirs[1]} of {theirs[0]} experts; this model has "
                f"top-{ours[1]} of {ours[0]}: give routes that a model of this shape sampled"
            )
        missing = [n for n in self.layer_numbers if n - 1 not in info.moe_layers]
        if missing:
            raise ValueError(
                f"no routes for the layers {missing} (Megatron's numbers, from 1) of this model "
                f"chunk; there are routes for {[i + 1 for i in info.moe_layers]}"
            )


def router_mismatch(microbatches: Iterable[MicrobatchRoutes]) -> dict[int, tuple[int, int]]:
    """How often live routers would have chosen otherwise, on this rank, by layer number.

    Call it when the forward passes are over; it waits for the device once. Sum both numbers over
    the ranks before you divide: ranks have different numbers of tokens.

    Returns:
        For each layer the number of counted tokens with another live choice, and the number of
        counted tokens. Micro-batches without a tally are left out.
    """
    pairs: dict[int, list[Tensor]] = {}
    for tally in (one.tally for one in microbatches if one.tally is not None):
        counted = tally.counted_T.sum()
        for number, mismatched in tally.mismatched.items():
            pairs.setdefault(number, []).append(torch.stack([mismatched, counted]))
    if not pairs:
        return {}
    sums = torch.stack([torch.stack(pairs[number]).sum(0) for number in sorted(pairs)]).tolist()
    return {number: (wrong, of) for number, (wrong, of) in zip(sorted(pairs), sums, strict=True)}
