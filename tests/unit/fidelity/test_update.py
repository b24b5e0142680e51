"""What a case of the fidelity table asks of a training, and in which ways that is done wrongly."""

from dataclasses import asdict

import pytest

from proof.fidelity.models import MODELS
from proof.fidelity.update import Update

TWO = Update(mini_steps=2, old="trainer", source="old-policy")


def test_the_steps_share_out_the_rollouts_in_their_order():
    assert Update().steps(3) == [range(3)]
    assert TWO.steps(6) == [range(3), range(3, 6)]
    assert TWO.controls()["swap_mini_steps"].steps(6) == [range(3, 6), range(3)]
    with pytest.raises(AssertionError, match="5 rollouts in 2 steps"):
        TWO.steps(5)


def test_one_step_asks_for_nothing():
    assert Update().argv() == Update(temperature=0.7).argv() == []
    assert Update().controls() == {}


@pytest.mark.parametrize("update", [TWO, Update(temperature=0.7), MODELS["mini-steps"].update])
def test_every_control_has_one_fault(update):
    right = asdict(update)
    controls = update.controls()
    assert controls
    for wrong in controls.values():
        assert len(asdict(wrong).items() - right.items()) == 1
