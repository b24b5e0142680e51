"""`python gate_megatron.py`: the gate kernel against the Megatron-LM that is importable, as JSON.

The script is a process of its own, because TRITON_INTERPRET=1 must be set before Triton is
imported. For each case the kernel replays what Megatron's live top-k chose, taken from Megatron's
own function: from the ids, and as live rows.

Shape suffixes (docs/glossary.md): T, K, E.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_r3.replay.gate import GateInputs, GateOptions

T, E, K = 37, 64, 6
CASES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax before": {"use_pre_softmax": True, "scaling_factor": 2.5},
    "sigmoid, bias": {"score_function": "sigmoid", "expert_bias": True, "scaling_factor": 2.5},
    "sigmoid, K=1": {"score_function": "sigmoid", "topk": 1},
    "sqrtsoftplus, bias": {"score_function": "sqrtsoftplus", "expert_bias": True},
}
BREAKS = ("nothing", "id", "rows", "scale")


def compare(function: Callable[..., Any], options: dict[str, Any], broken: str) -> dict[str, Any]:
    """Wrong entries of the map, and errors divided by those that rounding explains."""
    from megatron_r3.replay.gate.triton import replayed_gate_triton

    options = dict(options)
    topk, dtype = options.pop("topk", K), options.pop("dtype")
    generator = torch.Generator().manual_seed(0)
    logits_TE = (3 * torch.randn(T, E, generator=generator)).to(dtype)
    upstream_TE = torch.randn(T, E, generator=generator).to(dtype)
    if options.pop("expert_bias", False):
        options["expert_bias"] = torch.randn(E, generator=generator)
    theirs = logits_TE.clone().requires_grad_()
    want_TE, map_TE = function(theirs, topk, **options)
    want_TE.backward(upstream_TE)
    ids_TK = map_TE.int().argsort(dim=1, descending=True, stable=True)[:, :topk]
    live_T = None if broken != "nothing" else torch.arange(T) % 3 == 0
    if broken == "id":
        ids_TK[5, 0] = int((~map_TE[5]).nonzero()[0])
    elif broken == "rows":
        ids_TK[[5, 6]] = ids_TK[[6, 5]]
    elif broken == "scale":
        options["scaling_factor"] = 1.001 * (options.get("scaling_factor") or 1.0)
    if live_T is not None:
        ids_TK[live_T] = 0  # the kernel does not read the ids of live rows
    ours = logits_TE.clone().requires_grad_()
    bias_E = options.pop("expert_bias", None)
    inputs = GateInputs(ours, ids_TK, expert_bias_E=bias_E, live_T=live_T)
    out = replayed_gate_triton(inputs, GateOptions(**options))
    out.probs_TE.backward(upstream_TE)
    assert ours.grad is not None
    assert theirs.grad is not None
    probs_T = want_TE.detach().double().abs().amax(dim=1, keepdim=True)
    upstream_T = upstream_TE.double().abs().amax(dim=1, keepdim=True)
    return {
        "map": int((out.routing_map_TE != map_TE).sum()),
        "probs": error(out.probs_TE, want_TE, probs_T),
        "gradient": error(ours.grad, theirs.grad, probs_T * upstream_T),
    }


def error(got_TE: Tensor, want_TE: Tensor, size_T: Tensor) -> float:
    """The largest difference, divided by what roundings explain: 1 and less is right.

    Allowed are about sixteen roundings of float32 on each side, of numbers up to `size_T`, and one
    rounding to the dtype on each side. Megatron rounds to the nearest number and Triton's
    interpreter cuts bfloat16 off, which together is one and a half eps.
    """
    arithmetic_T = 32 * torch.finfo(torch.float32).eps * size_T
    room = arithmetic_T + 1.5 * torch.finfo(want_TE.dtype).eps * want_TE.detach().double().abs()
    return ((got_TE.double() - want_TE.double()).abs() / room).max().item()


def results() -> Iterator[dict[str, Any]]:
    from megatron.core.transformer.moe import moe_utils

    function = moe_utils.topk_routing_with_score_function
    known = inspect.getsource(function)
    for name, options in CASES.items():
        if options.get("score_function", "softmax") not in known:
            continue  # an older line
        # up to 0.17 Megatron rounds bfloat16 scores before it compares and divides them
        whole = "logits.float()).type_as(logits)" not in known
        for dtype in (torch.float32, torch.bfloat16) if whole else (torch.float32,):
            for broken in BREAKS if dtype == torch.float32 else BREAKS[:1]:
                row = compare(function, {**options, "dtype": dtype}, broken)
                yield {"name": name, "dtype": str(dtype), "broken": broken, **row}


if __name__ == "__main__":
    from megatron_r3.cpu import install

    install()
    print(json.dumps(list(results())))
