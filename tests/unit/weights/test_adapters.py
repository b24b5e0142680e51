"""LoRA adapters are added to the weights that they belong to, and to no others."""

from __future__ import annotations

import torch

from megatron_r3.weights.adapters import adapters_of
from megatron_r3.weights.gather import Plan, Whole
from megatron_r3.weights.pieces import Place

LINEAR = "decoder.layers.self_attention.linear_proj"
WEIGHT = Place(f"{LINEAR}.weight", 3)
OTHER = Place("decoder.layers.mlp.router.weight", 3)
IN, OUT = (Place(f"{LINEAR}.adapter.linear_{part}.weight", 3) for part in ("in", "out"))
SHAPES = {WEIGHT: (6, 5), OTHER: (6, 5), IN: (2, 5), OUT: (6, 2)}


class Adapter(torch.nn.Module):
    alpha = 8


class Wrapper(torch.nn.Module):
    """As Megatron-Bridge wraps a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.to_wrap, self.adapter, self._adapter_enabled = torch.nn.Identity(), Adapter(), True


def test_an_adapter_is_added_to_its_weight() -> None:
    plan: Plan = {place: Whole(shape) for place, shape in SHAPES.items()}
    adapters = adapters_of([Wrapper()], plan)
    dtypes = {WEIGHT: torch.bfloat16, OTHER: torch.bfloat16}
    gathered = adapters.beside(dtypes)
    exact = torch.float32
    assert gathered == {WEIGHT: exact, OTHER: torch.bfloat16, IN: exact, OUT: exact}
    wholes = {place: torch.randn(SHAPES[place], dtype=dtype) for place, dtype in gathered.items()}
    want = wholes[WEIGHT] + 8 / 2 * wholes[OUT] @ wholes[IN]
    other = wholes[OTHER].clone()
    adapters.merge(wholes, dtypes)
    assert wholes.keys() == {WEIGHT, OTHER}
    torch.testing.assert_close(wholes[WEIGHT], want.bfloat16(), rtol=1e-2, atol=1e-2)
    assert torch.equal(wholes[OTHER], other)


def test_a_model_without_adapters() -> None:
    adapters = adapters_of([torch.nn.Linear(2, 2)], {OTHER: Whole(SHAPES[OTHER])})
    dtypes = {OTHER: torch.bfloat16}
    assert adapters.parts == {}
    lookalike: Plan = {place: Whole(shape) for place, shape in SHAPES.items()}
    assert adapters_of([torch.nn.Linear(2, 2)], lookalike).parts == {}  # and so refused
    assert adapters.beside(dtypes) == dtypes
