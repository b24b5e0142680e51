"""The cases of the trainings of `make gpu`: what each runs, and what it must show.

A case is a function that yields rows as they are known: a name, and the fields of the row. A row
that cannot be measured here has `skipped` with the reason. Cases that compare the gradients of two
trainings shift all routes by a token, so that gradients of a layer that routes live are far off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from proof.gpu import training_judge as judge
from proof.gpu.training_rank import Order, Seen
from proof.gpu.training_runs import DETERMINISTIC, Place, RunFailed

Row = dict[str, Any]
Rows = Iterator[tuple[str, Row]]

NO_TE = "Transformer Engine's layers are not used here"
NO_CUDA = "it needs a CUDA device"
GROUPED = "TEGroupedMLP"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
SELECTIVE = "--recompute-granularity selective --recompute-modules".split()
NO_PLAN = "--no-moe-router-replay-dispatch-plan"
FP8 = ["--fp8-format", "hybrid", "--fp8-recipe"]
TURN = ("live", "no plan", "given")


def judged(seen: Seen | RunFailed, judgement: Callable[[Seen], Row]) -> Row:
    """The row of a training, or the error that it ended with."""
    if isinstance(seen, RunFailed):
        return {"ok": False, "error": str(seen)}
    try:
        return judgement(seen)
    except (IndexError, KeyError, ValueError) as error:  # a training that ended early
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}


def beside(seen: Seen | RunFailed, base: Seen | RunFailed, f: Callable[[Seen, Seen], Row]) -> Row:
    """The row of a training that is compared with another one."""
    if isinstance(base, RunFailed):
        return {"ok": False, "error": f"the training to compare with failed: {base}"}
    return judged(seen, lambda one: f(one, base))


def exactness(place: Place) -> Rows:
    """Train replayed, with and without a dispatch plan, and live; then time all three."""
    experts = GROUPED if place.te else ""
    plain = place.order(steps=3)
    orders = {
        # The control has shifted routes: in few rollouts live routers may choose all recorded
        # experts, but not all shifted ones.
        "live": replace(plain, arguments=place.arguments("shifted", steps=3)),
        "replay without plan": place.order("right", NO_PLAN, steps=3),
        "replay with plan": place.order("right", "--moe-router-replay-verify-plan", steps=3),
    }
    for name, seen in place.run_all(orders).items():
        check = judge.live if name == "live" else judge.replayed
        yield name, judged(seen, lambda one, check=check: check(one, experts))
    turns = judge.WARM_UP + place.scale.pairs
    ways = [*TURN] * turns
    unmeasured = ("--moe-router-replay-log-mismatch-interval", "0")
    timed = place.order("right", *unmeasured, steps=len(ways), ways=ways)
    timed.arguments.remove("--moe-router-replay-verify-dispatch")  # it needs the mismatch metrics
    (seen,) = place.run_all({"times": timed}).values()
    yield "times", judged(seen, lambda one: judge.times(one, TURN, place.scale.pairs))


def recorded(place: Place) -> Rows:
    """Record what live routers choose, replay the record, and replay it with one expert changed."""
    ways = ["record", "recorded", "changed"]
    order = place.order("right", *DETERMINISTIC, steps=3, ways=ways, gradients=True)
    (seen,) = place.run_all({"record and replay": order}).values()
    yield "record and replay", judged(seen, judge.recorded)


def recompute(place: Place) -> Rows:
    """Recompute bound to its micro-batch, and as a control not bound.

    With fp8 Megatron recomputes by `te_checkpoint`.
    """

    def order(*more: str, bound: bool = True) -> Order:
        return place.order("shifted", *DETERMINISTIC, *more, gradients=True, bound=bound)

    orders = {
        "none": order(),
        "full": order(*FULL),
        "moe": order(*SELECTIVE, "moe"),
        "layernorm": order(*SELECTIVE, "layernorm"),
        "full, unbound": order(*FULL, bound=False),
    }
    if place.te:
        fp8 = [*FP8, "tensorwise"]
        orders |= {
            "moe_act": order(*SELECTIVE, "moe_act"),
            "te_checkpoint none": order(*fp8),
            "te_checkpoint full": order(*fp8, *FULL),
            "te_checkpoint moe": order(*fp8, *SELECTIVE, "moe"),
            "te_checkpoint full, unbound": order(*fp8, *FULL, bound=False),
        }
    seen = place.run_all(orders)
    for name in orders:
        with_te = name.startswith("te_checkpoint")
        base = seen["te_checkpoint none" if with_te else "none"]
        if name.endswith("none"):
            yield name, judged(seen[name], lambda one: judge.replayed(one, sampled=False))
        elif name.endswith("unbound"):
            yield name, beside(seen[name], base, judge.unbound)
        else:
            again = name.endswith(("full", "moe"))  # the experts run again
            yield name, beside(seen[name], base, _recomputed(again, with_te))
    if not place.te:
        for name in ("moe_act", "te_checkpoint full", "te_checkpoint moe"):
            yield name, {"skipped": NO_TE}


def _recomputed(again: bool, with_te: bool) -> Callable[[Seen, Seen], Row]:
    """How a recompute is judged: bitwise if experts run again in bfloat16, else by a tolerance."""
    passes, by = (2 if again else 1), ("te_checkpoint" if with_te else "checkpoint")
    bitwise = again and not with_te
    return lambda seen, base: judge.recomputed(seen, base, passes, bitwise, by)


def grad_fusion(place: Place) -> Rows:
    """Compare gradients summed over micro-batches inside the layers (fused) with those outside."""
    on = place.order("shifted", *DETERMINISTIC, gradients=True, stand_in=True)
    fused = [word for word in on.arguments if word != "--no-gradient-accumulation-fusion"]
    off = place.order("shifted", *DETERMINISTIC, gradients=True)
    seen = place.run_all({"on": replace(on, arguments=fused), "off": off})
    yield "off", judged(seen["off"], lambda one: judge.fused_wgrad(one, one, False))
    yield "on", beside(seen["on"], seen["off"], lambda a, b: judge.fused_wgrad(a, b, True))


def fp8(place: Place) -> Rows:
    """Replay with experts in fp8."""
    orders = {
        recipe: place.order("shifted", *FP8, recipe, steps=2)
        for recipe in ("tensorwise", "delayed")
    }
    if not place.te:
        for name in orders:
            yield name, {"skipped": NO_TE}
        return
    for name, seen in place.run_all(orders).items():
        yield name, judged(seen, lambda one: judge.replayed(one, GROUPED, sampled=False))


def cuda_graphs(place: Place) -> Rows:
    """CUDA graphs of attention, captured after warm-up steps."""
    if place.cpu or not place.te:
        yield "attention", {"skipped": NO_CUDA if place.cpu else NO_TE}
        return
    graphs = "--cuda-graph-impl transformer_engine --cuda-graph-modules attn "
    graphs += "--cuda-graph-warmup-steps 3"
    seen = place.run_all(
        {
            "without": place.order("shifted", steps=6, gradients=True),
            "attention": place.order("shifted", *graphs.split(), steps=6, gradients=True),
        }
    )
    yield "attention", beside(seen["attention"], seen["without"], judge.graphed)


def fused_gate(place: Place) -> Rows:
    """Compare replay with the gate as one kernel with replay with the unfused gate."""
    rehearsed = {"reference_gate": place.cpu}
    orders = {
        "unfused": place.order("shifted", gradients=True),
        "fused": place.order("shifted", "--moe-router-fusion", gradients=True, **rehearsed),
    }
    seen = place.run_all(orders)
    yield "fused", beside(seen["fused"], seen["unfused"], judge.gated)


CASES: dict[str, Callable[[Place], Rows]] = {
    "exactness": exactness,
    "recorded": recorded,
    "recompute": recompute,
    "grad-fusion": grad_fusion,
    "fp8": fp8,
    "cuda-graphs": cuda_graphs,
    "fused-gate": fused_gate,
}
