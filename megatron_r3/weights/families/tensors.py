"""How transformers' tensors are made of Megatron's, by the rows of a family's table.

A rule is two functions, the second one the inverse of the first. Both only move values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_r3.weights.family import Mapped
from megatron_r3.weights.pieces import Place

# the arguments are Megatron's TransformerConfig and the tensors to be converted
Change = Callable[[Any, list[Tensor]], list[Tensor]]


class Rule(NamedTuple):
    """How to convert between the Megatron tensors and the transformers tensors of one row.

    Attributes:
        to_hf, to_megatron: inverse functions; the results may share memory with the arguments.
        all_experts: whether a transformers tensor holds all experts of a layer.
    """

    to_hf: Change
    to_megatron: Change
    all_experts: bool = False


class Tensors(NamedTuple):
    """A row of a table: a tensor of Megatron, and the tensors of transformers with its values.

    Attributes:
        ours, theirs: Megatron's and transformers' names; for a layer's tensor only the part of the
            name behind the layer's number.
        when: a field of TransformerConfig; the model has the tensor only if the field is set.
        unless: a field of TransformerConfig; the model has the tensor only if the field is not set.
    """

    ours: str
    theirs: str
    rule: Rule
    when: str = ""
    unless: str = ""


def table(text: str) -> tuple[Tensors, ...]:
    """Read rows: Megatron's name, transformers' names, a rule of RULES, and maybe a condition.

    Example: `mlp.linear_fc1.weight mlp.{gate,up}_proj.weight halves`. In layer 3 Megatron's tensor
    decoder.layers.3.mlp.linear_fc1.weight is two tensors of transformers: the first half of the
    rows is model.layers.3.mlp.gate_proj.weight, the second half ...up_proj.weight. Braces are as in
    a shell. A `*` is the number of an expert. A last word `if=FIELD` or `unless=FIELD` is `when` or
    `unless` of `Tensors`.
    """
    rows = []
    for line in text.strip().splitlines():
        ours, theirs, rule, *more = line.split()
        options = dict(word.replace("if=", "when=").split("=") for word in more)
        rows.append(Tensors(ours, theirs, RULES[rule], **options))
    return tuple(rows)


def mapped(rows: Iterable[Tensors], config: Any, layer: int | None = None) -> Iterator[Mapped]:
    """Yield the tensors of one layer, or the tensors outside of the layers.

    Args:
        config: Megatron's TransformerConfig.
        layer: the layer's index from 0; None for the tensors outside of the layers.
    """
    ours, theirs = ("", "") if layer is None else ("decoder.layers.", f"model.layers.{layer}.")
    for row in rows:
        depends = row.when or row.unless
        if depends and bool(getattr(config, depends)) != bool(row.when):
            continue
        names = _names(theirs + row.theirs)
        is_expert = row.rule.all_experts or "*" in row.theirs
        experts = range(config.num_moe_experts) if is_expert else [None]
        places = [Place(ours + row.ours, layer, expert) for expert in experts]
        for group in [places] if row.rule.all_experts else [[place] for place in places]:
            yield Mapped(
                tuple(group),
                tuple(name.replace("*", str(group[0].expert)) for name in names),
                partial(row.rule.to_hf, config),
                partial(row.rule.to_megatron, config),
                own_dtype(group[0]),
            )


def own_dtype(place: Place) -> torch.dtype | None:
    """float32 for the router's expert bias, as transformers always stores that bias; else None."""
    return torch.float32 if place.key.endswith("mlp.router.expert_bias") else None


def _names(pattern: str) -> tuple[str, ...]:
    """The names in a pattern: `x.{gate,up}.weight` stands for x.gate.weight and x.up.weight."""
    first, *rest = re.split(r"\{(.*)\}", pattern)
    return tuple(first + word + rest[1] for word in rest[0].split(",")) if rest else (first,)


def _as_it_is(config: Any, tensors: list[Tensor]) -> list[Tensor]:
    return tensors


def _apart(config: Any, whole: list[Tensor]) -> list[Tensor]:
    return list(whole[0].chunk(2))


def _joined(config: Any, parts: list[Tensor]) -> list[Tensor]:
    return [torch.stack(parts).flatten(0, 1)]  # unlike cat, stack refuses parts of unequal shapes


def _heads(config: Any) -> tuple[int, int, int]:
    """The number of query groups, the number of queries in a group, and the size of a head."""
    groups = config.num_query_groups
    return groups, config.num_attention_heads // groups, config.kv_channels


def _by_kind(config: Any, whole: list[Tensor]) -> list[Tensor]:
    """Split the weight or the bias of `linear_qkv` into queries, keys and values.

    Example with 4 heads in 2 query groups: Megatron's rows are, head by head,
    q0 q1 k0 v0 q2 q3 k1 v1 (each group's queries, then its key and its value); transformers has the
    three tensors q0 q1 q2 q3, k0 k1 and v0 v1.
    """
    groups, queries, head = _heads(config)
    row = whole[0].shape[1:]
    by_group = whole[0].reshape(groups, queries + 2, head, *row)
    return [part.reshape(-1, *row) for part in by_group.split([queries, 1, 1], dim=1)]


def _by_group(config: Any, parts: list[Tensor]) -> list[Tensor]:
    groups, _, head = _heads(config)
    row = parts[0].shape[1:]
    by_group = [part.reshape(groups, -1, head, *row) for part in parts]
    return [torch.cat(by_group, dim=1).reshape(-1, *row)]


def _stacked(config: Any, experts: list[Tensor]) -> list[Tensor]:
    """Stack all experts into one tensor, and transpose each weight; a bias is not transposed."""
    return [torch.stack(experts).transpose(1, -1)]


def _unstacked(config: Any, stacked: list[Tensor]) -> list[Tensor]:
    return [expert.t() for expert in stacked[0]]


def _taking_turns(config: Any, experts: list[Tensor]) -> list[Tensor]:
    """`_stacked`, with Megatron's rows g0 g1 u0 u1 (gate, then up) in the order g0 u0 g1 u1."""
    return _stacked(config, [torch.stack(e.chunk(2), dim=1).flatten(0, 1) for e in experts])


def _one_after_another(config: Any, stacked: list[Tensor]) -> list[Tensor]:
    return [torch.cat([rows[0::2], rows[1::2]]) for rows in _unstacked(config, stacked)]


RULES = {
    "same": Rule(_as_it_is, _as_it_is),
    "halves": Rule(_apart, _joined),
    "qkv": Rule(_by_kind, _by_group),
    "stacked": Rule(_stacked, _unstacked, all_experts=True),
    "stacked-in-turns": Rule(_taking_turns, _one_after_another, all_experts=True),
}
