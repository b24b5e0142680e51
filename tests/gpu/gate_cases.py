"""Inputs for the gate kernel, and how far it may be from the float64 reference.

The kernel runs natively on a CUDA device. Elsewhere it runs under Triton's interpreter, if
TRITON_INTERPRET=1 was set before Triton was imported, as by
tests/unit/replay/gate/test_interpreted.py.

Shape suffixes (docs/glossary.md): T, K, E.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_r3.replay.gate import (
    Gate,
    GateInputs,
    GateOptions,
    GateOutput,
    replayed_gate_reference,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
needs_a_way_to_run = pytest.mark.skipif(
    not INTERPRETED and DEVICE == "cpu",
    reason="no CUDA device here, and no TRITON_INTERPRET=1 (unit/replay/gate/test_interpreted.py)",
)
# name -> options
FUNCTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "pre-softmax": {"use_pre_softmax": True},
    "sigmoid": {"score_function": "sigmoid"},
    "sqrtsoftplus": {"score_function": "sqrtsoftplus"},
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def call(gate: Gate, logits_TE: Tensor, ids_TK: Tensor, **options: Any) -> GateOutput:
    """Call a gate with everything by name: fields of GateOptions and of GateInputs."""
    names = {field.name for field in fields(GateOptions)} & options.keys()
    gate_options = GateOptions(**{name: options.pop(name) for name in names})
    return gate(GateInputs(logits_TE, ids_TK, **options), gate_options)


def kernel(logits_TE: Tensor, ids_TK: Tensor, **options: Any) -> GateOutput:
    """The Triton kernel, called with everything by name."""
    return call(_kernel(), logits_TE, ids_TK, **options)


def _kernel() -> Gate:
    from megatron_r3.replay.gate.triton import replayed_gate_triton  # imports Triton

    return replayed_gate_triton


@dataclass
class Case:
    """Logits, ids, further inputs and options of the gate by name, the gradient of its output."""

    logits: Tensor
    ids: Tensor
    upstream: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, gate: Any = None, dtype: torch.dtype | None = None) -> tuple[GateOutput, Tensor]:
        """The output of a gate (default: the kernel) and the gradient of the logits."""
        logits = self.logits.detach().to(dtype or self.logits.dtype).requires_grad_()
        out = call(gate or _kernel(), logits, self.ids, **self.options)
        (gradient,) = torch.autograd.grad(
            out.probs_TE, logits, self.upstream.to(out.probs_TE.dtype)
        )
        return out, gradient


def make(
    num_tokens: int,
    num_experts: int,
    topk: int,
    dtype: torch.dtype = torch.float32,
    ids_dtype: torch.dtype = torch.int16,
    spread: float = 3.0,
    seed: int = 0,
    **options: Any,
) -> Case:
    """Random logits; random distinct experts, which is not what top-k would choose."""
    generator = torch.Generator().manual_seed(seed)
    logits_TE = spread * torch.randn(num_tokens, num_experts, generator=generator)
    ids_TK = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :topk]
    upstream = torch.randn(num_tokens, num_experts, generator=generator)
    if options.pop("bias", False):
        options["expert_bias_E"] = torch.randn(num_experts, generator=generator).to(DEVICE)
    for name in ("live_T", "counted_T"):
        if name in options:  # the share of such rows
            share = options[name]
            options[name] = (torch.rand(num_tokens, generator=generator) < share).to(DEVICE)
    return Case(
        logits_TE.to(DEVICE, dtype),
        ids_TK.to(DEVICE, ids_dtype),
        upstream.to(DEVICE, dtype),
        options,
    )


def worst(case: Case, got: tuple[GateOutput, Tensor]) -> dict[str, float]:
    """Counts of wrong rows, and the largest errors divided by what rounding explains: see `holds`.

    The expectation is the float64 reference for the experts that `got` used. Whether a live row
    used the right experts is counted separately, as "ids".
    """
    out, gradient_TE = got
    options = {
        name: value for name, value in case.options.items() if name not in ("live_T", "counted_T")
    }
    replay = Case(case.logits, out.ids_TK, case.upstream, options)
    want, want_gradient_TE = replay.run(replayed_gate_reference, torch.float64)
    map_TE = torch.zeros(case.logits.shape, dtype=torch.bool, device=DEVICE)
    map_TE.scatter_(1, out.ids_TK.long(), True)
    result = {
        "map": float((out.routing_map_TE != map_TE).sum()),
        "ids": _wrong_ids(case, out),
        "probs": _ratio(out.probs_TE, want.probs_TE, _relative(case) * want.probs_TE),
        "gradient": _ratio(
            gradient_TE, want_gradient_TE, _relative(case) * _magnitude(replay, want, map_TE)
        ),
    }
    if out.differs_T is not None:
        result["differs"] = _wrong_differs(case, out.differs_T, map_TE)
    return result


def holds(result: dict[str, float]) -> bool:
    """Whether no row is wrong, and rounding explains all errors of weights and gradients."""
    errors = ("probs", "gradient")
    return all(value <= (1.0 if name in errors else 0.0) for name, value in result.items())


def _relative(case: Case) -> Tensor:
    """The relative error that float32 arithmetic may have, for each row.

    A sum of at most 64 positive weights in any order, or of 1024 as a tree over 32 each: 32 eps.
    An exponential in numerator and sum, whose argument of size s is itself rounded: 2 (2 + s) eps.
    Two divisions, a root, a product of at most 2 eps each; the rest is for the derivative's chain.
    """
    size_T = case.logits.double().abs().amax(dim=1, keepdim=True) if len(case.logits) else 0.0
    return torch.finfo(torch.float32).eps * (64 + 4 * torch.as_tensor(size_T))


def _ratio(got: Tensor, want: Tensor, allowed: Tensor) -> float:
    """The largest error, divided by what is allowed.

    That is what the arithmetic allows, one rounding to the dtype (a whole eps, because Triton's
    interpreter cuts bfloat16 off), and the smallest number, below which a device may round to 0.
    """
    info = torch.finfo(got.dtype)
    floor = max(info.smallest_normal * info.eps, torch.finfo(torch.float32).tiny)
    room = allowed.abs() + info.eps * want.abs() + floor
    return ((got.double() - want).abs() / room).max().item() if got.numel() else 0.0


def _magnitude(case: Case, want: GateOutput, map_TE: Tensor) -> Tensor:
    """The gradient with its two terms added and not subtracted: rounding errors scale with it."""
    options = {**case.options, "scaling_factor": None}
    factor = case.options.get("scaling_factor") or 1.0
    upstream = case.upstream.double().abs() * factor
    upstream = upstream * map_TE
    logits_TE = case.logits.double()
    function = options.get("score_function", "softmax")
    if function == "softmax" and options.get("use_pre_softmax"):
        weights_TE = logits_TE.softmax(dim=1)
    else:
        weights_TE = call(replayed_gate_reference, logits_TE, case.ids, **options).probs_TE
    common_T = (weights_TE * upstream).sum(dim=1, keepdim=True)
    if function == "softmax":
        return weights_TE * (upstream + common_T)
    scores_TE, slopes_TE = _scores(logits_TE, function)
    if case.ids.shape[1] == 1:
        return slopes_TE * upstream
    total_T = (scores_TE * map_TE).sum(dim=1, keepdim=True)
    return slopes_TE * (upstream + common_T) / total_T


def _scores(logits: Tensor, function: str) -> tuple[Tensor, Tensor]:
    sigmoid = logits.sigmoid()
    if function == "sigmoid":
        return sigmoid, sigmoid * (-logits).sigmoid()
    root = logits.exp().log1p().sqrt()
    return root, sigmoid / (2 * root)


def selected_by(case: Case) -> tuple[Tensor, Tensor]:
    """The selection scores of a live top-k, in float64, and how far off float32 may be."""
    logits_TE, function = case.logits.double(), case.options.get("score_function", "softmax")
    if function == "softmax" and not case.options.get("use_pre_softmax"):
        return logits_TE, torch.zeros_like(logits_TE)
    scores_TE = logits_TE.softmax(dim=1)
    if function != "softmax":
        scores_TE, _ = _scores(logits_TE, function)
    unsure_TE = _relative(case) * scores_TE
    bias_E = case.options.get("expert_bias_E")
    if bias_E is None:
        return scores_TE, unsure_TE
    eps = torch.finfo(torch.float32).eps
    return scores_TE + bias_E.double(), unsure_TE + eps * (scores_TE + bias_E.double().abs())


def _wrong_ids(case: Case, out: GateOutput) -> float:
    """How many given rows have other ids than those given, and live rows ids that are no top-k."""
    live_T = case.options.get("live_T")
    given_T = (out.ids_TK == case.ids).all(dim=1)
    if live_T is None:
        return float((~given_T).sum())
    map_TE = torch.zeros(case.logits.shape, dtype=torch.bool, device=DEVICE)
    map_TE.scatter_(1, out.ids_TK.long(), True)
    as_many_T = map_TE.sum(dim=1) == case.ids.shape[1]
    is_topk_T = as_many_T & (_gap(case, map_TE)[0] <= 0)
    return float((~torch.where(live_T, is_topk_T, given_T)).sum())


def _wrong_differs(case: Case, differs_T: Tensor, map_TE: Tensor) -> float:
    surely_T, perhaps_T = (gap_T > 0 for gap_T in _gap(case, map_TE))
    counted_T = case.options["counted_T"]
    return float((((surely_T & counted_T) & ~differs_T) | (differs_T & ~perhaps_T)).sum()) + float(
        (differs_T & ~counted_T).sum()
    )


def _gap(case: Case, map_TE: Tensor) -> tuple[Tensor, Tensor]:
    """How far the best expert left out is above the worst one taken: at least, and at most."""
    scores_TE, unsure_TE = selected_by(case)

    def gap(sign: int) -> Tensor:
        left_TE = (scores_TE + sign * unsure_TE).masked_fill(map_TE, -torch.inf)
        taken_TE = (scores_TE - sign * unsure_TE).masked_fill(~map_TE, torch.inf)
        return left_TE.amax(dim=1) - taken_TE.amin(dim=1)

    return gap(-1), gap(1)
