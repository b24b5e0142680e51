"""The list of routing options is closed: what nobody has looked at is refused by name."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import pytest

from megatron_r3.replayable import unknown_options
from megatron_r3.seams.option import refusals


@dataclass
class Newer:
    """A config of a Megatron-LM that nobody here has seen."""

    num_moe_experts: int = 8
    moe_router_load_balancing_type: Any = "aux_loss"
    moe_router_score_function: str = "softmax"
    moe_token_dispatcher_type: str = "alltoall"
    moe_router_topk: int = 2
    moe_n_hash_layers: int = 0
    offload_cold_experts: bool = False
    use_mega_kernel: bool = False
    routing_scheme: str | None = None
    hidden_size: int = 8
    use_megatron_fsdp: bool = False
    moe_layer_list: list[int] = field(default_factory=list)


NEW = {
    "moe_n_hash_layers=3": {"moe_n_hash_layers": 3},
    "offload_cold_experts=True": {"offload_cold_experts": True},
    "use_mega_kernel=True": {"use_mega_kernel": True},
    "routing_scheme='hash'": {"routing_scheme": "hash"},
    "moe_layer_list=[1]": {"moe_layer_list": [1]},
    "moe_router_score_function='tanh'": {"moe_router_score_function": "tanh"},
    "moe_token_dispatcher_type='rdma'": {"moe_token_dispatcher_type": "rdma"},
    "moe_router_load_balancing_type='new'": {"moe_router_load_balancing_type": ["none", "new"]},
}


@pytest.mark.parametrize("name", NEW)
def test_an_option_that_nobody_has_looked_at_is_refused_by_name(name: str) -> None:
    (reason,) = refusals(Newer(**NEW[name]))
    assert reason.startswith(f"{name}: nobody here has looked at")
    assert "report it with your Megatron-LM version" in reason


def test_known_options_and_those_about_something_else_are_accepted() -> None:
    assert refusals(Newer()) == []
    assert refusals(Newer(moe_router_topk=4, hidden_size=16, use_megatron_fsdp=True)) == []


def test_arguments_are_compared_with_the_defaults_of_the_config() -> None:
    from types import SimpleNamespace

    given = SimpleNamespace(**{f.name: getattr(Newer(), f.name) for f in fields(Newer)})
    assert unknown_options(given, Newer) == []
    given.moe_n_hash_layers = 3
    assert unknown_options(given, Newer) == ["moe_n_hash_layers=3"]
    assert unknown_options(given) == []  # control: without the defaults nobody can tell


def test_a_framework_cannot_turn_an_unknown_option_on_by_its_own_default() -> None:
    @dataclass
    class Framework(Newer):
        moe_n_hash_layers: int = 3

    assert unknown_options(Framework(), Newer) == ["moe_n_hash_layers=3"]
    assert unknown_options(Framework(moe_n_hash_layers=0), Newer) == []
