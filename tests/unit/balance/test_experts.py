"""Whose weights can travel, and grouped experts with guests behind their own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_r3.balance.experts import checked_weights, compute_with_guests
from megatron_r3.balance.parameters import parameters_are_there, wait_for_parameters


class Linear(torch.nn.Module):
    def __init__(self, num_gemms: int) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        for number in range(num_gemms):
            weight = torch.nn.Parameter(torch.full((2, 2), number + 1.0))
            self.register_parameter(f"weight{number}", weight)
            setattr(self, f"bias{number}", torch.Tensor())  # as Transformer Engine's

    def forward(self, hidden, sizes):
        assert len(sizes) == self.num_gemms
        assert not any(getattr(self, f"bias{n}").numel() for n in range(self.num_gemms))
        parts = zip(hidden.split(sizes), range(self.num_gemms), strict=True)
        return torch.cat([part @ getattr(self, f"weight{n}") for part, n in parts])


class Grouped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_local_experts = 2
        self.linear_fc1, self.linear_fc2 = Linear(2), Linear(2)

    def forward(self, hidden, sizes, probs):
        first = self.linear_fc1(hidden, sizes.tolist())
        return self.linear_fc2(first, sizes.tolist()) * probs[:, None], None


class OneByOne(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        experts = [torch.nn.Linear(2, 2, bias=False) for _ in range(2)]
        self.local_experts = torch.nn.ModuleList(experts)


def test_guests_stand_behind_own_experts_for_one_call():
    experts, guest = Grouped(), [torch.full((2, 2), 5.0), torch.full((2, 2), 7.0)]
    hidden, probs = torch.ones(4, 2), torch.ones(4)
    output = compute_with_guests(experts, [guest], hidden, torch.tensor([1, 1, 2]), probs)
    # every matrix of ones times c doubles and multiplies by c, twice
    assert output[:, 0].tolist() == [4 * 1 * 1, 4 * 2 * 2, 4 * 5 * 7, 4 * 5 * 7]
    assert experts.linear_fc1.num_gemms == experts.num_local_experts == 2
    assert {*experts.linear_fc1._parameters} == {"weight0", "weight1"}
    assert not hasattr(experts.linear_fc1, "bias2")


def test_weights_are_those_of_each_expert():
    weights = [[float(w.detach()[0, 0]) for w in one] for one in checked_weights(Grouped())]
    assert weights == [[1, 1], [2, 2]]
    assert [len(expert) for expert in checked_weights(OneByOne())] == [1, 1]


def test_weights_of_several_types_are_refused():
    experts = OneByOne()
    experts.local_experts[1].to(torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"OneByOne are of several types, .*bfloat16 and .*float32"
    ):
        checked_weights(experts)


def test_one_weight_for_all_experts_is_refused():
    experts = Grouped()
    experts.linear_fc2.register_parameter("weight", torch.nn.Parameter(torch.ones(2, 2, 2)))
    with pytest.raises(ValueError, match="Grouped has other weights than one for each expert"):
        checked_weights(experts)


class DistributedDataParallel:
    """Megatron's, as far as its hook: its name, and what it refers to."""

    def __init__(self, groups: dict) -> None:
        self.param_to_bucket_group = groups

    def _make_forward_pre_hook(self):
        def hook(module, *unused):
            for parameter in module.parameters(recurse=False):
                group = self.param_to_bucket_group[parameter]
                group.param_gather_dispatched, group.param_gather_handle = True, None

        return hook


@pytest.mark.parametrize(("dispatched", "handle"), [(False, None), (True, "under way")])
def test_parameters_are_waited_for(dispatched, handle):
    experts = OneByOne()
    assert parameters_are_there(experts)  # nothing gathers them
    parameters = [*experts.parameters()]
    groups = {
        parameters[0]: SimpleNamespace(param_gather_dispatched=True, param_gather_handle=None),
        parameters[1]: SimpleNamespace(
            param_gather_dispatched=dispatched, param_gather_handle=handle
        ),
    }
    hook = DistributedDataParallel(groups)._make_forward_pre_hook()
    for module in experts.modules():
        module.register_forward_pre_hook(hook)
    assert not parameters_are_there(experts)
    wait_for_parameters(experts)
    assert parameters_are_there(experts)
