"""A step of three frameworks that are written for RouterReplay: its passes; replay by hand.

A framework's own file (skyrl_client.py, nemo_rl_client.py, ms_swift_client.py) has a class
`Framework`, which runs that framework's own code on a chunk of a tiny model. It is imported only in
the process of a Megatron tree, since it imports Megatron.

Shape suffixes (docs/glossary.md): E, K, T.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from framework_cases import CASES, LAYOUTS, MICROBATCHES, REPLAYED, Case, Data
from replay_layouts import RECOMPUTE

from megatron_r3 import MicrobatchRoutes, local_routers, replaying
from proof.fidelity.tiny import LAYERS, TOPK, make_chunks


@dataclass
class Pass:
    """One pass of a decoder's router: its layer, micro-batch, whether a recompute, and its map."""

    layer: int
    microbatch: int
    again: bool
    map_TE: torch.Tensor


@dataclass
class Passes:
    """What the routers of this rank did in one step.

    Attributes:
        maps: each pass.
        rows: for each micro-batch the rows of the routers of this rank; -1 for padding.
        loss: of the framework; None where the rank has no last stage.
        routers: the gradient of each router, by layer.
    """

    maps: list[Pass] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)
    loss: list[float] | None = None
    routers: dict[int, torch.Tensor] = field(default_factory=dict)

    def same(self, other: Passes) -> bool:
        """Loss and router gradients bitwise equal."""
        return (
            self.loss == other.loss
            and self.routers.keys() == other.routers.keys()
            and all(torch.equal(g, other.routers[layer]) for layer, g in self.routers.items())
        )

    def wrong(self, routes: list[list[torch.Tensor]]) -> int:
        """Passes in which a token went elsewhere than its route in its micro-batch and layer says.

        Rows whose route is -1 may go anywhere.
        """
        wrong = 0
        for one in self.maps:
            whole = torch.cat(routes[one.microbatch])
            rows_T = self.rows[one.microbatch]
            ids_TK = whole[rows_T.clamp(min=0), one.layer - 1]
            has_T = (rows_T >= 0) & (ids_TK[:, 0] >= 0)
            want_TE = torch.zeros_like(one.map_TE).scatter(1, ids_TK.clamp(min=0), True)
            wrong += not (has_T.any() and torch.equal(want_TE[has_T], one.map_TE[has_T]))
        return wrong

    def again_alike(self) -> bool:
        """Whether each recompute chose what its forward pass chose, in rows without a route too."""
        first = {(p.layer, p.microbatch): p.map_TE for p in self.maps if not p.again}
        return all(torch.equal(first[p.layer, p.microbatch], p.map_TE) for p in self.maps)

    def experts(self) -> set[int]:
        """How many experts a token has, in any pass, padding included."""
        return {int(n) for p in self.maps for n in p.map_TE.sum(1)}


class Client:
    """A framework's own code on this rank.

    A subclass has `make_ready` (what the framework does before it makes a model), `set_replay`
    (what it does to its config) and `step`.

    Args:
        case: what is run.
        replays: whether the framework's replay is switched on.
        options: more options of the TransformerConfig.

    Attributes:
        forwards: how many forward passes a step of the framework has.
    """

    forwards = 1

    def __init__(self, case: Case, replays: bool = True, **options: Any) -> None:
        self.case, self.replays, self.data = case, replays, Data()
        self.sizes = LAYOUTS[case.layout][1]
        self.make_ready()
        (self.chunk,) = make_chunks(
            self.sizes,
            self.set_replay if replays else lambda config: None,
            variable_seq_lengths=True,
            **RECOMPUTE[case.recompute],
            **case.options,
            **options,
        )
        self.rows: list[torch.Tensor] = []
        self.after_model()

    def make_ready(self) -> None:
        """What the framework does before it makes a model."""

    def set_replay(self, config: Any) -> None:
        """What the framework does to a config to switch replay on."""
        config.moe_enable_routing_replay = True

    def after_model(self) -> None:
        """What the framework does when it has a model."""

    def step(self, routes: list[list[torch.Tensor]] | None, forward_only: bool) -> Any:
        """A step of the framework on both micro-batches; routes are those of `Data`.

        Returns:
            What it says of the loss of each micro-batch; None or empty without a last stage.
        """
        raise NotImplementedError

    def run(self, routes: list[list[torch.Tensor]] | None, forward_only: bool = False) -> Passes:
        """A step, and what the routers did in it."""
        passes = Passes()
        self.chunk.zero_grad(set_to_none=True)
        with ExitStack() as hooks:
            self._watch(passes, hooks)
            with torch.set_grad_enabled(not forward_only):
                loss = self.step(routes, forward_only)
        passes.loss = [float(one) for one in loss] if loss else None
        passes.rows = self.rows = self._own_rows(passes.rows)
        for layer, router in local_routers(self.chunk).items():
            if router.weight.grad is not None:
                passes.routers[layer] = router.weight.grad.clone()
        return passes

    def _watch(self, passes: Passes, hooks: ExitStack) -> None:
        """Fill in `maps` and `rows`."""
        is_inside, again = False, dict.fromkeys(range(LAYERS + 1), 0)

        def begin(_: Any, given: Any, named: Any) -> None:
            nonlocal is_inside
            is_inside = True
            tokens = named["input_ids"] if "input_ids" in named else given[0]
            passes.rows.append(self.data.rows_of(len(passes.rows) % MICROBATCHES, tokens))

        def end(*_: Any) -> None:
            nonlocal is_inside
            is_inside = False

        def keep(router: Any, _: Any, output: Any) -> None:
            # Both schedules run the backward passes in the order of the forward passes, so that
            # the first recompute of a layer is that of micro-batch 0.
            number = (len(passes.rows) - 1) % MICROBATCHES
            if not is_inside:
                number = again[router.layer_number]
                again[router.layer_number] += 1
            map_TE = output[1].detach().clone()
            passes.maps.append(Pass(router.layer_number, number, not is_inside, map_TE))

        for handle in (
            self.chunk.register_forward_pre_hook(begin, with_kwargs=True),
            self.chunk.register_forward_hook(end, always_call=True),
            *(router.register_forward_hook(keep) for router in local_routers(self.chunk).values()),
        ):
            hooks.callback(handle.remove)

    def _own_rows(self, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        """What the routers of this rank see of these rows."""
        from megatron.core import parallel_state as mpu

        if "pipeline_model_parallel_size" in self.sizes:
            # The first stage knows them: a later one may be given tokens in another layout, which
            # it does not read.
            everywhere: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(everywhere, rows)
            rows = everywhere[0]
        if not self.chunk.config.sequence_parallel:
            return rows
        size, rank = (
            mpu.get_tensor_model_parallel_world_size(),
            mpu.get_tensor_model_parallel_rank(),
        )
        return [rows_T.chunk(size)[rank] for rows_T in rows]

    def without_some(self, routes: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Routes of which some rows of micro-batch 0 are missing, as this framework marks them."""
        kept = [[one.clone() for one in each] for each in routes]
        kept[0][0][3] = kept[0][1][5] = kept[0][1][-1] = -1
        return kept

    def run_by_hand(self, routes: list[list[torch.Tensor]]) -> Passes:
        """A step in which the framework knows nothing of replay, each forward in `replaying`."""
        rows = self.run(None, forward_only=True).rows
        forward, number = self.chunk.forward, 0

        def with_routes(*args: Any, **kwargs: Any) -> Any:
            nonlocal number
            whole = torch.cat(routes[number])[rows[number].clamp(min=0)]
            whole[rows[number] < 0] = torch.arange(TOPK)  # what these frameworks pad with
            number = (number + 1) % MICROBATCHES
            live_T = (whole[:, 0] < 0).any(1)
            layers = [*local_routers(self.chunk)]
            ids = {layer: whole[:, layer - 1].clamp(min=0) for layer in layers}
            live = dict.fromkeys(layers, live_T) if live_T.any() else None
            with replaying(MicrobatchRoutes(ids, live_T=live, checked=True)):
                return forward(*args, **kwargs)

        self.chunk.forward = with_routes
        return self.run(None)


def shifted(routes: list[list[torch.Tensor]]) -> dict[str, list[list[torch.Tensor]]]:
    """The controls: routes of the token before, and the experts after the recorded ones."""
    return {
        "token": [[one.roll(1, 0) for one in each] for each in routes],
        "expert": [[torch.where(one < 0, one, (one + 1) % 8) for one in each] for each in routes],
    }


def framework(name: str) -> type[Client]:
    """The class of tests/clients/NAME_client.py."""
    made: type[Client] = importlib.import_module(f"{name}_client").Framework
    return made


def fused(run: Callable[[], Any]) -> Any:
    """`run` with the reference in place of the kernel of moe_router_fusion, which needs CUDA."""
    from megatron_r3.replay.gate import replayed_gate_reference, substitute_gate

    with substitute_gate(replayed_gate_reference):
        return run()


# -- what a rank runs


def dropped_in(rank: int, name: str, case: Case) -> dict[str, Any]:
    """A forward-only pass, a step, and the controls, by the framework's code on the drop-in."""
    import megatron_r3.frameworks.router_replay  # noqa: F401

    def run() -> dict[str, Any]:
        client = framework(name)(case)
        routes = client.data.routes
        if case.missing:
            routes = client.without_some(routes)
        before = client.run(shifted(routes)["expert"], forward_only=True)
        step = client.run(routes)
        controls = {}
        for shift, given in shifted(routes).items():
            passes = client.run(given)
            seen = passes.wrong(routes) == len(passes.maps) > 0
            controls[shift] = seen and passes.wrong(given) == 0 and not passes.same(step)
        return {
            "before": (len(before.maps), before.wrong(shifted(routes)["expert"])),
            "passes": len(step.maps),
            "forwards": client.forwards,
            "wrong": step.wrong(routes),
            "recompute alike": step.again_alike(),
            "experts": step.experts(),
            "controls": controls,
            "queues": [
                len(router.router_replay.replay_backward_list)
                for router in local_routers(client.chunk).values()
            ],
            "step": step,
        }

    return fused(run) if case.options.get("moe_router_fusion") else run()


def by_hand(rank: int, name: str, case: Case) -> Passes:
    """The same step without the drop-in."""
    client = framework(name)(case, replays=False, moe_router_replay=True)
    routes = client.data.routes
    if case.missing:
        routes = client.without_some(routes)
    run = lambda: client.run_by_hand(routes)  # noqa: E731
    return fused(run) if case.options.get("moe_router_fusion") else run()


def by_itself(rank: int, name: str, case: Case, **attributes: Any) -> Passes:
    """The framework's code on upstream's class, without the drop-in.

    Args:
        attributes: of the class `Framework`.
    """
    made = framework(name)
    for attribute, value in attributes.items():
        setattr(made, attribute, value)
    client = made(case)
    return client.run(client.data.routes)


def step_dropped_in(rank: int, name: str, case: Case, **attributes: Any) -> Passes:
    """The same on the drop-in."""
    import megatron_r3.frameworks.router_replay  # noqa: F401

    return by_itself(rank, name, case, **attributes)


# -- what a test asks


def check(worker: Any, name: str, case_name: str) -> None:
    """One case: what the module's docstring promises."""
    case = CASES[case_name]
    number = LAYOUTS[case.layout][0]
    ranks = worker.run(dropped_in, number, name, case, timeout_s=180)
    want = worker.run(by_hand, number, name, case, timeout_s=120)
    forward = REPLAYED.get(case_name, LAYERS) * MICROBATCHES
    assert any(hand.loss for hand in want)
    for result, hand in zip(ranks, want, strict=True):
        assert result["before"] == (forward, 0)
        recomputes = 0 if case.recompute == "none" else 1
        assert result["passes"] == forward * (result["forwards"] + recomputes)
        assert result["wrong"] == 0
        assert result["recompute alike"]
        assert result["experts"] == {TOPK}
        assert result["controls"] == {"token": True, "expert": True}
        assert set(result["queues"]) <= {0}
        assert len(hand.routers) == REPLAYED.get(case_name, LAYERS)
        assert result["step"].same(hand), (result["step"].loss, hand.loss)


def check_off(patched: Any, unpatched: Any, name: str, case_name: str) -> None:
    """Without the import: bitwise what upstream's class does on the unpatched tree."""
    case = CASES[case_name]
    number = LAYOUTS[case.layout][0]
    ours, theirs = (
        w.run(by_itself, number, name, case, timeout_s=120) for w in (patched, unpatched)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one.same(other)
        assert len(one.maps) == len(other.maps) > 0
        assert all(
            torch.equal(a.map_TE, b.map_TE) for a, b in zip(one.maps, other.maps, strict=True)
        )
        assert one.wrong(Data().routes) == 0
