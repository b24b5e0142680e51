"""Called by patch 1: a TopKRouter asks the active microbatch for the experts of its tokens.

A router's load-balancing losses, z-loss and expert bias are sums over tokens. Replay changes two
things about these sums. Padding is left out, since the active microbatch knows the padding in every
layout. And the experts that are counted are the replayed ones or, on request, the live ones.

Shape suffixes (docs/glossary.md): T, E, K.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_r3.replay.active import active_microbatch
from megatron_r3.replay.gate import GateInputs, GateOptions, has_kernel, replayed_gate
from megatron_r3.replay.gate.gate_options import MAX_EXPERTS, MAX_TOPK
from megatron_r3.replay.microbatch import MicrobatchRoutes, Mode, ReplayError
from megatron_r3.seams.option import prepare_config

TopK = Callable[..., tuple[Tensor, Tensor]]


class RouterHook:
    """Answers one router from the active microbatch; without a microbatch the router is live.

    `topk_routing_with_score_function` calls the hook as it calls Megatron's `RouterReplay`. The
    hook holds no routes, only its layer number, which `Router.set_layer_number` writes.

    Args:
        config: the router's TransformerConfig.
        has_routes: False for a router of which no rollout has routes (MTP): it stays live.
        layer_number: Megatron's layer number, from 1. None means that it is not known yet.
        recorder: upstream's RouterReplay, with which an inference engine records the experts of
            passes without a microbatch. None means that no engine records this router.

    Raises:
        ValueError: the config asks for replay and could not replay exactly. This is checked again
            here, since `moe_router_replay` may have been set after the config was made.
    """

    def __init__(
        self,
        config: Any,
        has_routes: bool = True,
        layer_number: int | None = None,
        recorder: Any = None,
    ) -> None:
        if getattr(config, "moe_router_replay", False):
            prepare_config(config, was_made=True)
        self.has_routes = has_routes
        self.layer_number = layer_number
        self.recorder = recorder
        # An expert bias that follows the live load needs the live top-k in every pass. The fused
        # gate would run in addition to the unfused function, and save nothing.
        self.fused = getattr(config, "moe_router_replay_fused_gate", None) is True and not (
            config.moe_router_enable_expert_bias and config.moe_router_replay_expert_bias == "live"
        )

    def __getattr__(self, name: str) -> Any:
        """An attribute of the recorder, for an engine that calls `get_recorded_indices` etc."""
        recorder = self.__dict__.get("recorder")  # a hook that is being copied has no fields yet
        if recorder is None:
            raise AttributeError(f"RouterHook has no {name}, and no recorder")
        return getattr(recorder, name)

    def microbatch(self) -> MicrobatchRoutes | None:
        """The active microbatch; None if there is none, or if this router stays live."""
        return active_microbatch() if self.has_routes else None

    def replayed_microbatch(self) -> MicrobatchRoutes | None:
        """The microbatch that gives this router its routes now; None if the router chooses."""
        microbatch = self.microbatch()
        return microbatch if microbatch is not None and microbatch.mode is Mode.REPLAY else None

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, live: TopK
    ) -> tuple[Tensor, Tensor]:
        """Scores and expert ids `[T, K]`: of the replayed experts, or of the live ones if no routes
        are replayed.

        Upstream gives the arguments by position (megatron/core/transformer/moe/moe_utils.py,
        `compute_topk`).

        Args:
            scores: `[T, E]`.
            live: the top-k that upstream would take.

        Raises:
            ReplayError: as `MicrobatchRoutes.topk`; or code for upstream's RouterReplay has set an
                action to replay.
        """

        def live_topk() -> tuple[Tensor, Tensor]:
            return live(scores, topk, num_groups=num_groups, group_topk=group_topk)

        records = self._records()
        microbatch = self.microbatch()
        if microbatch is None:
            scores_TK, ids_TK = live_topk()
            if records:
                self.recorder.record_indices(ids_TK)
            return scores_TK, ids_TK
        assert self.layer_number is not None, "the router has no layer number yet"
        return microbatch.topk(self.layer_number, scores, topk, live_topk)

    def route(self, logits: Tensor, topk: int, **options: Any) -> tuple[Tensor, Tensor]:
        """Probabilities and routing map `[T, E]`; called as `topk_routing_with_score_function` is.

        Without a microbatch this function calls `topk_routing_with_score_function` as upstream
        does, but unfused if an engine records. With a microbatch a replayed layer takes our fused
        gate, if `_fused_gate` can compute the layer. Every other layer calls the function unfused,
        and the function calls `get_replay_topk`. Upstream's fused kernel would ignore the routes.

        Raises:
            ReplayError: as `get_replay_topk`.
        """
        replays = self.microbatch() is not None
        if replays and self.fused:
            routed = self._fused_gate(logits, topk, options)
            if routed is not None:
                return routed
        if replays or self._records():
            options["fused"] = False  # Transformer Engine's top-k would not ask the hook
        # Looked up at each pass, because a framework may replace the function at any time. An
        # import statement would take 1 us more, and the module has been imported.
        upstream: Any = sys.modules["megatron.core.transformer.moe.router"]
        return upstream.topk_routing_with_score_function(logits, topk, **options)

    def _records(self) -> bool:
        """Whether an inference engine has this router record what it chooses.

        Raises:
            ReplayError: the recorder was told to replay.
        """
        action = getattr(self.recorder, "router_replay_action", None)
        # by value: a framework may have an enum of its own
        if action is not None and action.value != "record":
            raise ReplayError(
                f"RouterReplay was told to {action.value}, but beside moe_router_replay it only "
                "records what an engine samples: import megatron_r3.frameworks.router_replay "
                "before the model is made, or turn one of moe_router_replay and "
                "moe_enable_routing_replay off"
            )
        return action is not None

    def _fused_gate(
        self, logits_TE: Tensor, topk: int, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor] | None:
        """Probabilities and routing map `[T, E]` of a replayed layer, from one kernel.

        Returns:
            None where the kernel cannot compute them: nothing is replayed, there is no Triton or
            CUDA, the router is in float64 or larger than the kernel's limits, or the router is
            group-limited and the microbatch has tokens that choose live or are compared. The result
            is None in all passes of a layer or in none, so that a recompute rounds as its forward
            pass did.
        """
        microbatch = self.replayed_microbatch()
        too_large = logits_TE.shape[1] > MAX_EXPERTS or topk > MAX_TOPK
        if microbatch is None or too_large or logits_TE.dtype == torch.float64:
            return None
        # The kernel chooses and counts by a top-k over all experts, which knows no groups.
        grouped = options["group_topk"] is not None
        if not has_kernel(logits_TE.device) or (microbatch.chooses and grouped):
            return None
        assert self.layer_number is not None, "the router has no layer number yet"
        ids_TK, live_T, counted_T = microbatch.begin_layer(self.layer_number, logits_TE, topk)
        score_function = options["score_function"]
        # Upstream adds no bias to the scores of a softmax router.
        bias_E = None if score_function == "softmax" else options["expert_bias"]
        out = replayed_gate(
            GateInputs(logits_TE, ids_TK, bias_E, live_T, counted_T),
            GateOptions(score_function, options["use_pre_softmax"], options["scaling_factor"]),
        )
        microbatch.end_layer(self.layer_number, out.ids_TK, out.differs_T)
        return out.probs_TE, out.routing_map_TE


def make_hooks(router: Any, recorder: Any = None) -> tuple[RouterHook, RouterLoad]:
    """The objects that a TopKRouter with moe_router_replay asks for its experts and its load.

    The router of an MTP layer stays live: MTP layers are numbered from 1 again, and no engine
    returns their routes. Before 0.17 a router cannot know that its layer is MTP; there `keep_live`
    tells the router.

    Args:
        recorder: upstream's RouterReplay, if moe_enable_routing_replay is on too.

    Raises:
        ValueError: as `RouterHook`.
    """
    has_routes = not getattr(router, "is_mtp_layer", False)
    return RouterHook(router.config, has_routes, recorder=recorder), RouterLoad(router)


def begin_pass(router: Any, given_T: Tensor | None) -> Tensor | None:
    """Refuse a router that cannot replay as its config asks; return the pass's padding mask.

    Raises:
        ReplayError: an option of replay was not set yet when the router was made, or slime's own
            replay has registered at the router.
    """
    if not isinstance(router.router_replay, RouterHook):
        raise ReplayError(
            "moe_router_replay was set after this model was made, so its routers and recomputes "
            "do not know of it: set it in the TransformerConfig before the model is made"
        )
    wants_recorder = getattr(router.config, "moe_enable_routing_replay", False)
    if wants_recorder and router.router_replay.recorder is None:
        raise ReplayError(
            "moe_enable_routing_replay was set after this model was made, so its routers do not "
            "record: set it in the TransformerConfig before the model is made"
        )
    # With ENABLE_ROUTING_REPLAY=1 slime's patch of Megatron-LM gives each router a list of routes:
    # a router without routes of ours would take those of slime's list.
    if hasattr(router, "routing_replay"):
        raise ReplayError(
            "moe_router_replay is set, and slime's own replay has registered at this router: they "
            "would compete for it; unset ENABLE_ROUTING_REPLAY (slime: --use-routing-replay, "
            "--use-rollout-routing-replay), or moe_router_replay"
        )
    return router.router_load.padding_mask(given_T)  # type: ignore[no-any-return]


def keep_live(module: Any) -> None:
    """Tell the routers in an MTP layer to stay live; called only on 0.16 (see `make_hooks`)."""
    from megatron.core.transformer.moe.router import TopKRouter

    for router in module.modules():
        if isinstance(router, TopKRouter):
            router.router_replay.has_routes = False


class RouterLoad:
    """The tokens and experts that the losses and the expert bias of one router count.

    A router that stays live (MTP) has a RouterLoad too.

    Args:
        router: the TopKRouter; its `router_replay` is a RouterHook.
    """

    def __init__(self, router: Any) -> None:
        self.router = router

    def padding_mask(self, given_T: Tensor | None) -> Tensor | None:
        """Which tokens are padding, bool: as the active microbatch says, else what was given."""
        # Megatron passes its own mask only to some layers and schedules. The microbatch's mask is
        # there in all of them, in the order of this router's tokens.
        microbatch = active_microbatch()
        padding_T = None if microbatch is None else microbatch.padding_T
        return given_T if padding_T is None else padding_T

    def without_padding(self, values_TE: Tensor, given_T: Tensor | None = None) -> Tensor:
        """A map or scores `[T, E]`, with the rows of padding tokens set to zero."""
        padding_T = self.padding_mask(given_T)
        return values_TE if padding_T is None else values_TE * ~padding_T[:, None]

    def mean_tokens(self, local: int | Tensor) -> float | int | Tensor:
        """How many tokens are not padding, as a mean over the ranks that share the sequences.

        Upstream scales the auxiliary loss by the rank's own count (router.py,
        `attach_and_log_load_balancing_loss`), which is equal to the mean if no token is padding.
        Example: of 8 tokens on two ranks the last 2 are padding. The ranks' own counts are 4 and 2,
        and both ranks scale by 3.

        Args:
            local: the rank's own count, used where the microbatch does not know the mean. An int
                counts padding too, which is subtracted here; a tensor does not count padding.
        """
        microbatch = active_microbatch()
        if microbatch is None:
            return local
        if microbatch.mean_tokens is not None:
            return microbatch.mean_tokens
        padding_T = microbatch.padding_T
        return (~padding_T).sum() if padding_T is not None and isinstance(local, int) else local

    def map_for_aux_loss(
        self, routed_TE: Tensor, live_TE: Tensor, given_T: Tensor | None = None
    ) -> Tensor:
        """The routing map `[T, E]` that the auxiliary losses count.

        Args:
            routed_TE: where the tokens go.
            live_TE: the routing map that upstream would count.
            given_T: upstream's padding mask, or None.
        """
        follows_live = self.router.config.moe_router_replay_aux_loss == "live"
        replayed = self.router.router_replay.replayed_microbatch() is not None
        return self.without_padding(
            routed_TE if replayed and not follows_live else live_TE, given_T
        )

    def map_for_expert_bias(
        self, logits_TE: Tensor, routed_TE: Tensor, given_T: Tensor | None = None
    ) -> Tensor:
        """The routing map `[T, E]` that the expert bias counts, without padding.

        With gradients off, or without an expert bias, this is `routed_TE` unchanged, because
        upstream does not count it then (router.py, `_apply_expert_bias`).

        Args:
            logits_TE: the logits by which the router chose.
            routed_TE: where the tokens go.
            given_T: the padding mask of this pass, or None.
        """
        config, hook = self.router.config, self.router.router_replay
        if not config.moe_router_enable_expert_bias or not torch.is_grad_enabled():
            return routed_TE
        follows_live = config.moe_router_replay_expert_bias == "live"
        if follows_live and hook.replayed_microbatch() is not None:
            routed_TE = self.live_map(logits_TE)
        return self.without_padding(routed_TE, given_T)

    @torch.no_grad()
    def live_map(self, logits_TE: Tensor) -> Tensor:
        """Where the tokens would go without replay, bool `[T, E]`."""
        from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

        router = self.router
        return topk_routing_with_score_function(
            logits_TE,
            router.topk,
            use_pre_softmax=router.config.moe_router_pre_softmax,
            num_groups=router.config.moe_router_num_groups,
            group_topk=router.config.moe_router_group_topk,
            score_function=router.score_function,
            expert_bias=router.expert_bias,
        )[1]
