"""How a rank computes guests beside its own experts: one by one, or grouped.

Megatron has two kinds of experts. `SequentialMLP` has a module for each expert and calls one after
the other. `TEGroupedMLP` has two linear layers with a weight for each expert, `weight0`, `weight1`
and so on, and multiplies all of them at once (megatron/core/transformer/moe/experts.py).

Shape suffixes (docs/glossary.md): H, P.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.func import functional_call

_LINEARS = "linear_fc1", "linear_fc2"


def expert_weights(experts: Any) -> list[list[Tensor]]:
    """The parameters of each own expert, in the order in which a guest's parameters come."""
    if hasattr(experts, "local_experts"):
        return [[*expert.parameters()] for expert in experts.local_experts]
    linears = [getattr(experts, name) for name in _LINEARS]
    names = [f"weight{number}" for number in range(experts.num_local_experts)]
    return [[getattr(linear, name) for linear in linears] for name in names]


def checked_weights(experts: Any) -> list[list[Tensor]]:
    """`expert_weights`, after a check that guests can have these weights.

    Raises:
        ValueError: the weights of an expert cannot be sent as one row of numbers.
    """
    option, kind = "moe_router_replay_guest_slots", type(experts).__name__
    if not hasattr(experts, "local_experts"):
        names = {f"weight{number}" for number in range(experts.num_local_experts)}
        linears = [getattr(experts, name, None) for name in _LINEARS]
        if not all({*getattr(linear, "_parameters", ())} == names for linear in linears):
            raise ValueError(
                f"{option}: {kind} has other weights than one for each expert in linear_fc1 and "
                "linear_fc2; leave the option out"
            )
    weights = expert_weights(experts)
    dtypes = {str(part.dtype) for parts in weights for part in parts}
    if len(dtypes) != 1:
        raise ValueError(
            f"{option}: the weights of {kind} are of several types, "
            f"{' and '.join(sorted(dtypes))}; leave the option out"
        )
    if any(isinstance(part, DTensor) for parts in weights for part in parts):
        raise ValueError(
            f"{option}: the weights of {kind} are sharded, so no rank has the whole weights of an "
            "expert to send; leave the option out"
        )
    return weights


def compute_with_guests(
    experts: Any,
    guests: Sequence[Sequence[Tensor]],
    hidden_PH: Tensor,
    tokens_per_place: Tensor,
    probs_P: Tensor,
) -> Tensor:
    """The output `[P, H]` of own experts and guests.

    Args:
        guests: the weights of each guest.
        tokens_per_place: the number of tokens of each own expert, then of each guest.
    """
    if not hasattr(experts, "local_experts"):
        return _with_more(experts, guests)(hidden_PH, tokens_per_place, probs_P)[0]
    # One by one: the first own expert's module computes each guest, with the guest's weights.
    of_own = tokens_per_place[: len(tokens_per_place) - len(guests)]
    sizes = [int(of_own.sum()), *tokens_per_place[len(of_own) :].tolist()]
    hidden, probs = hidden_PH.split(sizes), probs_P.split(sizes)
    outputs = [experts(hidden[0], of_own, probs[0])[0]]
    like = experts.local_experts[0]
    names = [name for name, _ in like.named_parameters()]
    for weights, hidden_of_guest, probs_of_guest in zip(guests, hidden[1:], probs[1:], strict=True):
        by_name = dict(zip(names, weights, strict=True))
        outputs.append(functional_call(like, by_name, (hidden_of_guest, probs_of_guest))[0])
    return torch.cat(outputs)


def _with_more(experts: Any, guests: Sequence[Sequence[Tensor]]) -> Any:
    """A copy of a layer's grouped experts that has the guests after the layer's own experts.

    The copy shares everything else with the layer's experts: parameters, hooks, settings. The
    layer's experts themselves are not changed.
    """
    wide = copy.copy(experts)
    wide._modules = dict(experts._modules)
    number = wide.num_local_experts = experts.num_local_experts + len(guests)
    for part, name in enumerate(_LINEARS):
        linear = copy.copy(getattr(experts, name))
        linear._parameters = dict(linear._parameters)
        for place, weights in enumerate(guests, experts.num_local_experts):
            linear._parameters[f"weight{place}"] = weights[part]
        if hasattr(linear, "bias0"):  # Transformer Engine has an empty bias for each weight
            for place in range(experts.num_local_experts, number):
                setattr(linear, f"bias{place}", linear.bias0)
        linear.num_gemms = number
        wide._modules[name] = linear
    return wide
