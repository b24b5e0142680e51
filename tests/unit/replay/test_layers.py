"""Which layers are MoE layers by the config, and which modules of a model are those."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_r3.replay.layers import local_moe_layers, local_routers, moe_layer_indices


class TopKRouter(torch.nn.Module):
    """A router before 0.17: it does not know whether it is in an MTP layer."""

    def __init__(self, layer_number):
        super().__init__()
        self.layer_number = layer_number


class BaseMoELayer(torch.nn.Module):
    def __init__(self, layer_number):
        super().__init__()
        self.layer_number = layer_number
        self.router = TopKRouter(layer_number)


class MultiTokenPredictionLayer(torch.nn.Module):
    def __init__(self, layer_number):
        super().__init__()
        self.transformer_layer = torch.nn.ModuleDict({"mlp": BaseMoELayer(layer_number)})


PLACES = {
    TopKRouter: "megatron.core.transformer.moe.router",
    BaseMoELayer: "megatron.core.transformer.moe.moe_layer",
    MultiTokenPredictionLayer: "megatron.core.transformer.multi_token_prediction",
}


@pytest.fixture(autouse=True)
def megatron(monkeypatch):
    for kind, place in PLACES.items():
        module = ModuleType(place)
        setattr(module, kind.__name__, kind)
        monkeypatch.setitem(sys.modules, place, module)


@pytest.mark.parametrize("mtp_number", [1, 5], ids=["0.15", "0.16"])
def test_those_of_mtp_layers_are_left_out_whatever_their_number(mtp_number):
    decoder = torch.nn.ModuleList(BaseMoELayer(number) for number in (1, 2, 4))
    mtp = torch.nn.ModuleList([MultiTokenPredictionLayer(mtp_number)])
    model = torch.nn.ModuleDict({"decoder": decoder, "mtp": mtp})
    assert local_moe_layers(model) == {1: decoder[0], 2: decoder[1], 4: decoder[2]}
    assert local_routers(model) == {layer.layer_number: layer.router for layer in decoder}


@pytest.mark.parametrize(
    ("frequency", "layers"), [(1, (0, 1, 2, 3, 4)), (2, (0, 2, 4)), ([0, 1, 1, 0, 1], (1, 2, 4))]
)
def test_moe_layers_follow_megatrons_rule(frequency, layers):
    assert moe_layer_indices(SimpleNamespace(num_layers=5, moe_layer_freq=frequency)) == layers


HYBRID = ["hybrid_layer_pattern", "hybrid_override_pattern"]  # from 0.17 on, before


@pytest.mark.parametrize("name", HYBRID)
def test_moe_layers_of_a_hybrid_model_are_those_of_its_pattern(name):
    config = SimpleNamespace(num_layers=6, moe_layer_freq=1, **{name: "*E|M-|EE/*E/*E"})
    assert moe_layer_indices(config) == (1, 4, 5)
