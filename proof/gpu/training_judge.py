"""Judges what the trainings of a case showed. Tests call these functions with wrong results.

A function that judges returns the fields of a row; `ok` says whether the row shows what it must.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from proof.benchmarks.interval import median_of
from proof.fidelity.judge import gradient_error
from proof.fidelity.models import BF16
from proof.gpu.training_rank import Seen, Step

# The sampler and the trainer compute the same model, so log-probs of a token differ by rounding to
# bfloat16. If a weight was not loaded, or loaded into a wrong place, they differ by 1 and more.
LOGPROB = 0.05
# how far two losses may differ: a loss is a mean over many tokens of ratio times advantage
LOSS = 2e-3
# The gradients of four micro-batches are rounded to bfloat16, by 2^-9 of the value, and then added.
ROUNDED = 2e-2
WARM_UP = 2  # steps of each way before times count


def dispatched(seen: Seen) -> float:
    """The share of (token, expert) pairs of all steps that reached the recorded expert."""
    pairs = [step.dispatched for step in seen.steps if step.dispatched is not None]
    total = sum(of for _, of in pairs)
    return sum(matched for matched, _ in pairs) / total if total else 0.0


def pairs(seen: Seen) -> int:
    """How many (token, expert) pairs the last step counted, in all passes."""
    return seen.steps[-1].dispatched[1] if seen.steps and seen.steps[-1].dispatched else 0


def trained(seen: Seen, experts: str = "", sampled: bool = True) -> dict[str, Any]:
    """Whether all losses and gradients are finite, and the layers are those that were meant.

    Args:
        experts: the class that the experts must have; empty for any.
        sampled: whether the store's log-probs are of this model with these routes, so that the
            trainer's must be near.
    """
    losses = [value for step in seen.steps for value in step.losses.values()]
    finite = all(torch.isfinite(torch.tensor(losses)).tolist()) and bool(losses)
    finite = finite and all(step.finite for step in seen.steps)
    apart = max((step.losses.get("abs dlogp", 0.0) for step in seen.steps), default=0.0)
    return {
        "ok": finite and (apart <= LOGPROB or not sampled) and experts in ("", seen.experts),
        "finite": finite,
        "logprob_difference": apart,
        "experts": seen.experts,
        "attention": seen.attention,
    }


def replayed(seen: Seen, experts: str = "", sampled: bool = True) -> dict[str, Any]:
    """A replayed training: every recorded token reached the recorded experts."""
    row = trained(seen, experts, sampled) | {"dispatched": dispatched(seen), "pairs": pairs(seen)}
    return row | {"ok": row["ok"] and row["dispatched"] == 1.0}


def live(seen: Seen, experts: str = "") -> dict[str, Any]:
    """A live training, the control: some tokens must have missed the experts of the store."""
    row = trained(seen, experts) | {"dispatched": dispatched(seen), "pairs": pairs(seen)}
    return row | {"ok": row["ok"] and 0.0 < row["dispatched"] < 1.0}


def same(one: Step, other: Step) -> bool:
    """Whether losses and gradients of two steps are the same to the last bit."""
    return (
        bool(one.gradients)
        and one.losses == other.losses
        and one.gradients.keys() == other.gradients.keys()
        and all(torch.equal(g, other.gradients[name]) for name, g in one.gradients.items())
    )


def recorded(seen: Seen) -> dict[str, Any]:
    """A training of three steps: recorded, replayed, and replayed with one expert changed."""
    first, again, changed = seen.steps
    row = trained(seen)
    row |= {"bitwise": same(first, again), "control_differs": not same(first, changed)}
    row["gradients"] = len(first.gradients)
    return row | {"ok": row["ok"] and row["bitwise"] and row["control_differs"]}


def compared(seen: Seen, base: Seen, tolerance: float = BF16) -> dict[str, Any]:
    """A replayed training beside another training that computes the same."""
    last, other = seen.steps[-1], base.steps[-1]
    error = gradient_error(last.gradients, other.gradients) if other.gradients else float("inf")
    loss = abs(last.losses["policy loss"] - other.losses["policy loss"])
    row = replayed(seen, sampled=False) | {"gradient_error": error, "loss_difference": loss}
    row["bitwise"] = same(last, other)
    return row | {"ok": row["ok"] and error <= tolerance and loss <= LOSS, "tolerance": tolerance}


def recomputed(seen: Seen, base: Seen, passes: int, bitwise: bool, by: str) -> dict[str, Any]:
    """A training with recompute beside one without.

    Args:
        passes: how often the experts must run with recompute for each time without recompute.
        bitwise: whether the gradients must be the same to the last bit.
        by: the name in `Seen.counts` of what must have bound the recompute.
    """
    row = compared(seen, base)
    row |= {"passes": pairs(seen) / max(pairs(base), 1), "bound": seen.counts}
    enough = row["passes"] == passes and seen.counts.get(by, 0) > 0
    return row | {"ok": row["ok"] and enough and (row["bitwise"] or not bitwise)}


def unbound(seen: Seen, base: Seen, tolerance: float = BF16) -> dict[str, Any]:
    """The control of `recomputed`: the binding was undone, and both counts and gradients show it.

    A recompute that is not bound has no micro-batch: it routes live, and no pairs are counted.
    """
    error = gradient_error(seen.steps[-1].gradients, base.steps[-1].gradients)
    passes = pairs(seen) / max(pairs(base), 1)
    shows = error > tolerance and passes == 1.0
    return {"ok": shows, "gradient_error": error, "passes": passes, "control": True}


def times(seen: Seen, ways: Sequence[str], pairs_wanted: int) -> dict[str, Any]:
    """Ratios of neighbouring steps of one process that goes through the ways in turn.

    Args:
        ways: the ways in their order; each later way is compared with the first one.
        pairs_wanted: how many times all ways must have run after the warm-up.
    """
    seconds = [step.seconds for step in seen.steps]
    turns = [seconds[i : i + len(ways)] for i in range(0, len(seconds), len(ways))][WARM_UP:]
    ratios = {
        f"{way} / {ways[0]}": median_of([turn[i] / turn[0] for turn in turns]).record()
        for i, way in enumerate(ways)
        if i
    }
    row = trained(seen) | {"ratios": ratios, "seconds": dict(zip(ways, turns[-1], strict=True))}
    return row | {"ok": row["ok"] and len(turns) == pairs_wanted}


def fused_wgrad(seen: Seen, base: Seen, fused: bool) -> dict[str, Any]:
    """A training with (`fused`) or without gradient accumulation fusion, beside one without.

    Without fusion each micro-batch's gradient is rounded to bfloat16 before it is added.
    """
    row = compared(seen, base, ROUNDED) | {"fused_modules": seen.fused_wgrad}
    row["stand_in_calls"] = seen.counts.get("stand_in", 0)
    as_meant = (row["fused_modules"] > 0) == fused == (row["stand_in_calls"] > 0)
    return row | {"ok": row["ok"] and as_meant}


def graphed(seen: Seen, base: Seen) -> dict[str, Any]:
    """A training with CUDA graphs beside one without: it has graphs, and its loss is steady."""
    row = compared(seen, base) | {"graphs": seen.counts.get("graphs", 0)}
    losses = [step.losses["policy loss"] for step in seen.steps]
    row["losses"] = losses
    steady = max(losses) - min(losses) <= LOSS  # eager steps first, then steps from graphs
    return row | {"ok": row["ok"] and row["graphs"] > 0 and steady}


def gated(seen: Seen, base: Seen) -> dict[str, Any]:
    """A training with the fused gate beside one without: the gate was really called."""
    row = compared(seen, base) | {"gate_calls": seen.counts.get("gate", 0)}
    apart = row["gate_calls"] > 0 and not base.counts.get("gate", 0)
    return row | {"ok": row["ok"] and apart}
