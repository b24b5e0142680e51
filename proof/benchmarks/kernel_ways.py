"""The ways to compute a router's weights and map, which `proof.benchmarks.kernel` compares.

The kernel needs torch, and Triton on a GPU. Megatron-LM and Transformer Engine are needed only by
the ways that call functions of these packages.

Shape suffixes (docs/glossary.md): T, K, E.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import Tensor

from megatron_r3.replay.gate import GateInputs, GateOptions, replayed_gate
from megatron_r3.replay.gate.reference import replayed_topk
from proof.benchmarks.machine import no_transformer_engine

KERNEL, UNFUSED, COMPILED, FLOOR = "kernel", "(a) unfused", "(b) compiled", "(d) copies"
TE, TE_GROUPS = "(c) TE, live", "(c) TE, live, groups"
OF_OTHERS = (TE, TE_GROUPS)  # ways that choose experts live, with a package that may be missing
Gate = Callable[[Tensor], tuple[Tensor, Tensor]]  # logits to probabilities and map, both [T, E]


@dataclass(frozen=True)
class Model:
    """The router of a model, in Megatron's terms."""

    num_experts: int
    topk: int
    score_function: str
    dtype: torch.dtype
    scaling_factor: float | None = None
    biased: bool = False  # an expert bias, which is used to choose experts only
    num_groups: int | None = None  # groups of experts, of which `group_topk` are chosen first
    group_topk: int | None = None


# Megatron's softmax after top-k is norm_topk_prob of the Qwen3 models
MODELS = {
    "Qwen3-30B-A3B": Model(128, 8, "softmax", torch.bfloat16),
    "DeepSeek-V3": Model(256, 8, "sigmoid", torch.float32, 2.5, True, 8, 4),
    "Kimi-K2": Model(384, 8, "sigmoid", torch.float32, 2.827, True),
    "Qwen3-Next": Model(512, 10, "softmax", torch.bfloat16),
}


class Inputs:
    """What the ways are called with, from random numbers that are the same in every run.

    Attributes:
        logits_TE: random, in the dtype of the model's router.
        upstream_TE: the gradient of the probabilities.
        ids_TK: recorded experts, in the integer dtype that a micro-batch's routes have.
        bias_E: the expert bias, or None for a model without one.
    """

    def __init__(self, model: Model, num_tokens: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)
        shape = (num_tokens, model.num_experts)

        def normal() -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(model.dtype)

        self.model = model
        self.logits_TE = normal().requires_grad_()
        self.upstream_TE = normal()
        # as if sampled with other weights: top-k would choose most of these experts, not all
        drifted_TE = self.logits_TE.detach().float() + 0.05 * normal().float()
        ids_dtype = torch.uint8 if model.num_experts <= 256 else torch.int16
        self.ids_TK = drifted_TE.topk(model.topk, dim=1).indices.to(ids_dtype)
        self.bias_E = None
        if model.biased:
            self.bias_E = torch.zeros(model.num_experts, device=device)


def ways(inputs: Inputs, megatron: Path | None, compiler: str) -> dict[str, Gate | str]:
    """The ways by name: the kernel, (a) unfused, (b) compiled, (c) Transformer Engine's.

    Args:
        inputs: what every way is called with.
        megatron: a tree whose own function is (a). None: (a) is the same chain, written here.
        compiler: the backend of torch.compile.

    Returns:
        For each way a function from logits to probabilities and map, or why the way cannot run.
    """
    unfused = _of_megatron(inputs, megatron) if megatron else unfused_of(inputs)
    # Every call of this function compiles once more. At its limit of recompilations torch.compile
    # silently runs the plain code, and (b) would be (a).
    torch._dynamo.reset()
    # a compiled backward may reuse saved buffers for its output, and then runs only once
    torch._functorch.config.donated_buffer = False
    named: dict[str, Gate | str] = {KERNEL: kernel_of(inputs), UNFUSED: unfused}
    named[COMPILED] = torch.compile(unfused, backend=compiler, dynamic=False)
    named[TE] = _of_transformer_engine(inputs, {"num_groups": None, "group_topk": None})
    if inputs.model.num_groups:
        groups = {"num_groups": inputs.model.num_groups, "group_topk": inputs.model.group_topk}
        named[TE_GROUPS] = _of_transformer_engine(inputs, groups)
    return named


def replay_of(map_TE: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities, gradient and map of the kernel that replays the experts of `map_TE`."""
    ids_TK = map_TE.int().topk(inputs.model.topk, dim=1).indices.to(inputs.ids_TK.dtype)
    probs_TE, replayed_TE = kernel_of(inputs, ids_TK)(inputs.logits_TE)
    (gradient_TE,) = torch.autograd.grad(probs_TE, inputs.logits_TE, inputs.upstream_TE)
    return probs_TE.detach(), gradient_TE, replayed_TE


def floor(inputs: Inputs) -> dict[str, Callable[[], Any]]:
    """Way (d) of each pass: plain fills and gathers of the bytes that the pass must move.

    The forward pass reads the logits of the given experts, and writes probabilities and map. The
    backward pass reads the logits of these experts and the gradient of their probabilities, and
    writes the gradient of all logits.
    """
    logits_TE, ids_TK = inputs.logits_TE.detach(), inputs.ids_TK.long()
    out_TE = torch.empty_like(logits_TE)
    map_TE = torch.empty_like(logits_TE, dtype=torch.bool)
    out_TK = torch.empty_like(ids_TK, dtype=logits_TE.dtype)

    def forward() -> None:
        torch.gather(logits_TE, 1, ids_TK, out=out_TK)
        out_TE.zero_()
        map_TE.zero_()

    def backward() -> None:
        torch.gather(logits_TE, 1, ids_TK, out=out_TK)
        torch.gather(inputs.upstream_TE, 1, ids_TK, out=out_TK)
        out_TE.zero_()

    return {"forward": forward, "backward": backward}


def kernel_of(inputs: Inputs, ids_TK: Tensor | None = None) -> Gate:
    """The kernel (on a CPU the plain reference) with `ids_TK`; None stands for the recorded ids."""
    ids_TK = inputs.ids_TK if ids_TK is None else ids_TK
    options = GateOptions(
        score_function=inputs.model.score_function, scaling_factor=inputs.model.scaling_factor
    )

    def gate(logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        out = replayed_gate(GateInputs(logits_TE, ids_TK, inputs.bias_E), options)
        return out.probs_TE, out.routing_map_TE

    return gate


def unfused_of(inputs: Inputs) -> Gate:
    """What `topk_routing_with_score_function` of Megatron 0.19 computes under replay.

    The code follows megatron/core/transformer/moe/moe_utils.py, with `replayed_topk` as its top-k.
    """
    model = inputs.model

    def gate(logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        if model.score_function == "softmax":
            scores_TK, indices_TK = replayed_topk(logits_TE, inputs.ids_TK)
            probs_TK = torch.softmax(scores_TK, dim=-1, dtype=torch.float32)
        else:
            scores_TE = torch.sigmoid(logits_TE.float())
            biased_TE = scores_TE if inputs.bias_E is None else scores_TE + inputs.bias_E.float()
            scores_TK, indices_TK = replayed_topk(biased_TE, inputs.ids_TK)
            if inputs.bias_E is not None:
                scores_TK = scores_TE.gather(1, indices_TK)
            probs_TK = scores_TK / (scores_TK.sum(dim=-1, keepdim=True) + 1e-20)
        if model.scaling_factor:
            probs_TK = probs_TK * model.scaling_factor
        probs_TK = probs_TK.type_as(logits_TE)
        probs_TE = torch.zeros_like(logits_TE).scatter(1, indices_TK, probs_TK)
        map_TE = torch.zeros_like(logits_TE).int().scatter(1, indices_TK, 1).bool()
        return probs_TE, map_TE

    return gate


class _Replay:
    """Gives Megatron's router the recorded experts, by a method of Megatron's `RouterReplay`."""

    def __init__(self, ids_TK: Tensor) -> None:
        self.ids_TK = ids_TK

    def get_replay_topk(self, scores_TE: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return replayed_topk(scores_TE, self.ids_TK)


def _of_megatron(inputs: Inputs, tree: Path) -> Gate:
    if str(tree) not in sys.path:
        sys.path.insert(0, str(tree))
    from megatron.core.transformer.moe import moe_utils

    options = {**_options(inputs), "router_replay": _Replay(inputs.ids_TK)}

    def gate(logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        return moe_utils.topk_routing_with_score_function(logits_TE, inputs.model.topk, **options)

    return gate


def _of_transformer_engine(inputs: Inputs, groups: dict[str, int | None]) -> Gate | str:
    """Transformer Engine's fused gate with live top-k: Transformer Engine cannot replay.

    All arguments are given by name, as in transformer_engine/pytorch/router.py of 2.16.1.
    """
    missing = no_transformer_engine()
    if missing:
        return missing
    from transformer_engine.pytorch.router import fused_topk_with_score_function

    options = {**_options(inputs), **groups}

    def gate(logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        return fused_topk_with_score_function(
            logits=logits_TE, topk=inputs.model.topk, use_pre_softmax=False, **options
        )

    return gate


def _options(inputs: Inputs) -> dict[str, Any]:
    """The options whose names are the same in Megatron and in Transformer Engine."""
    return {
        "score_function": inputs.model.score_function,
        "scaling_factor": inputs.model.scaling_factor,
        "expert_bias": inputs.bias_E,
    }


def agree(got: tuple[Tensor, ...], want: tuple[Tensor, ...], upstream_TE: Tensor) -> bool:
    """Whether probabilities and gradient are the same but for rounding, and maps are equal.

    Args:
        got, want: probabilities, gradient of the logits, and map, each `[T, E]`.
        upstream_TE: the gradient of the probabilities.

    A value may differ by 64 roundings of float32 at the largest value, and by two roundings to the
    dtype of the result.
    """
    (*got_values, got_map_TE), (*want_values, want_map_TE) = got, want
    if not torch.equal(got_map_TE, want_map_TE):
        return False
    largest = want_values[0].abs().max().float()
    sizes = (largest, largest * upstream_TE.abs().max())
    for got_TE, want_TE, size in zip(got_values, want_values, sizes, strict=True):
        room_TE = 64 * torch.finfo(torch.float32).eps * size
        room_TE = room_TE + 2 * torch.finfo(got_TE.dtype).eps * want_TE.float().abs()
        if not bool(((got_TE.float() - want_TE.float()).abs() <= room_TE).all()):
            return False
    return True
