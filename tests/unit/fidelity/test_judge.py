"""The judge of the fidelity table says no to everything that is not what was recorded.

Shape suffixes (docs/glossary.md): H, K, L, P, T.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from proof.fidelity.gradients import Piece, assemble, of_step
from proof.fidelity.judge import Judge, gradient_error
from proof.fidelity.layout import RankResult
from proof.fidelity.models import MODELS
from proof.fidelity.observe import Observed
from proof.fidelity.reference import Reference, Wrong
from proof.fidelity.rollouts import CONTROLS, make_rollouts
from proof.fidelity.table import passed

ROLLOUTS = make_rollouts(MODELS["moonlight"])
ROUTES = np.concatenate([r.routes_LTK for r in ROLLOUTS], axis=1)
LAYERS = {2: 0, 3: 1, 4: 2, 5: 3}  # Megatron's number: trace
HIDDEN = {
    layer: np.random.default_rng(layer).normal(size=(ROUTES.shape[1], 16)).astype(np.float32)
    for layer in LAYERS
}
GRADIENT = Piece("w", (4, 3), (0, 0), np.arange(12, dtype=np.float32).reshape(4, 3))
REFERENCE = Reference(HIDDEN, loss=-0.1, loss_scale=1.0, gradients=[GRADIENT])
LOAD = {layer: np.bincount(ROUTES[trace].ravel(), minlength=8) for layer, trace in LAYERS.items()}


def calls(shard=0, grad=True):
    """What two ranks with four experts each get, padding among it."""
    made = []
    for layer, trace in LAYERS.items():
        token, column = np.divmod(np.arange(ROUTES[trace].size), 2)
        expert = ROUTES[trace][token, column]
        for mine in (expert < 4, expert >= 4):
            hidden = np.concatenate([HIDDEN[layer][token[mine]], np.full((3, 16), 9, np.float32)])
            hidden += np.float32(1e-6)
            experts = np.concatenate([expert[mine], [expert[mine][0]] * 3])
            made.append(Observed(layer, hidden, experts, shard, grad))
    return made


def result(seen=None, loss=-0.1, gradient=GRADIENT):
    wrong = replace(GRADIENT, values=GRADIENT.values + 1)
    return RankResult(
        seen={"right": calls() if seen is None else seen},
        losses={"right": loss} | dict.fromkeys(CONTROLS, 0.0),
        gradients={"right": [gradient]} | {control: [wrong] for control in CONTROLS},
        dispatched={"right": 1.0},
        biases={
            layer: np.float32(1e-3) * np.sign(load.mean() - load).astype(np.float32)
            for layer, load in LOAD.items()
        },
    )


@pytest.fixture
def judge():
    return Judge(ROLLOUTS, REFERENCE, 2e-5)


def test_what_was_recorded_passes(judge):
    row = judge.row([result()])
    assert row["dispatched_as_recorded"] == 1.0
    assert row["tokens"] == ROUTES.shape[1]
    assert row["expert_bias_matches"]
    assert passed(row)


def changed(call, **arrays):
    return replace(call, **arrays)


def another_expert(seen):
    experts = seen[0].experts_P.copy()
    experts[0] = (experts[0] + 1) % 8
    return [changed(seen[0], experts_P=experts), *seen[1:]]


def another_token(seen):
    hidden = seen[0].hidden_PH.copy()
    hidden[0] = HIDDEN[2][-1]
    return [changed(seen[0], hidden_PH=hidden), *seen[1:]]


WRONG = {
    "another expert": another_expert,
    "another token": another_token,
    "a lost call": lambda seen: seen[1:],
    "a call too many": lambda seen: [*seen, seen[0]],
    "a lost layer": lambda seen: seen[2:],
    "nothing": lambda seen: [],
    "only a forward-only pass": lambda seen: [replace(call, grad=False) for call in seen],
    "a wrong first pass": lambda seen: [*seen, *another_expert(calls(grad=False))],
    "one shard of an expert only": lambda seen: [*seen, *calls(shard=1)[1:]],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_dispatch_that_differs_is_not_1(judge, wrong):
    assert judge.dispatched([result(WRONG[wrong](calls()))], "right") < 1.0
    assert not passed(judge.row([result(WRONG[wrong](calls()))]))


def test_every_shard_and_pass_may_see_all_of_it(judge):
    seen = [*calls(), *calls(grad=False), *calls(shard=1), *calls(shard=1, grad=False)]
    assert judge.dispatched([result(seen)], "right") == 1.0


def test_loss_gradient_and_bias_that_differ_fail(judge):
    assert not passed(judge.row([result(loss=-0.1001)]))
    off = replace(GRADIENT, values=GRADIENT.values * np.float32(1.0001))
    assert not passed(judge.row([result(gradient=off)]))
    biased = result()
    biased.biases[3] = -biased.biases[3]
    assert not passed(judge.row([biased]))
    del biased.biases[3]
    assert not passed(judge.row([biased]))


def test_a_control_that_nobody_sees_fails(judge):
    unseen = result()
    unseen.gradients["swap_layers"] = [GRADIENT]
    assert judge.row([unseen])["controls"]["swap_layers"] is False
    assert not passed(judge.row([unseen]))


FAR = replace(GRADIENT, values=GRADIENT.values * np.float32(1.02))
NEAR = replace(GRADIENT, values=GRADIENT.values * np.float32(1.005))
OTHER = np.roll(ROUTES, 1, axis=1)


@pytest.mark.parametrize(
    ("wrong", "is_caught"),
    [
        (Wrong([FAR], None), True),
        (Wrong([NEAR], None), False),
        (Wrong([GRADIENT], None), False),
        (Wrong([FAR], OTHER), True),
        (Wrong([NEAR], OTHER), False),
        (Wrong([FAR], ROUTES), False),  # routes that cannot be told from the right ones
    ],
)
def test_a_wrong_update_must_show_in_gradients_and_in_its_routes(wrong, is_caught):
    row = Judge(ROLLOUTS, replace(REFERENCE, wrong={"wrong": wrong}), 2e-5).row([result()])
    assert row["controls"]["wrong"] is is_caught
    assert passed(row) is is_caught


def test_routes_of_the_trainer_take_the_place_of_the_recorded_ones():
    wrong = {"wrong": Wrong([FAR], OTHER)}
    own = Judge(ROLLOUTS, replace(REFERENCE, routes_LTK=ROUTES, wrong=wrong), 2e-5, ())
    row = own.row([result()])
    assert passed(row)
    assert [*row["controls"]] == ["wrong"]
    silent = result()
    silent.dispatched.clear()  # the witness has the old policy's record too
    assert not passed(own.row([silent]))
    other = Judge(ROLLOUTS, replace(REFERENCE, routes_LTK=OTHER, wrong=wrong), 2e-5, ())
    assert other.row([result()])["dispatched_as_recorded"] < 1.0


def test_a_row_needs_a_control_and_the_witness(judge):
    without = Judge(ROLLOUTS, REFERENCE, 2e-5, ())
    assert not passed(without.row([result()]))
    silent = result()
    silent.dispatched.clear()
    assert not passed(judge.row([silent]))


@pytest.mark.parametrize("field", ["bitwise", "guests_match", "guests_came"])
def test_a_row_with_guests_needs_what_they_promise(judge, field):
    row = judge.row([result()]) | {"bitwise": True, "guests_match": True, "guests_came": True}
    assert passed(row)
    assert not passed(row | {field: False})


def test_every_step_counts():
    second = of_step([FAR], 1)
    assert [piece.name for piece in (*of_step([FAR], 0), *second)] == ["w", "w, step 2"]
    two = Judge(ROLLOUTS, replace(REFERENCE, gradients=[GRADIENT, *second]), 2e-5)
    seen = result()
    assert two.errors([seen], "right")[1] == float("inf")
    seen.gradients["right"] += second
    assert two.errors([seen], "right")[1] == 0.0
    seen.gradients["right"] = [GRADIENT, *of_step([NEAR], 1)]
    assert two.errors([seen], "right")[1] > 1e-2


def test_ranks_must_agree(judge):
    with pytest.raises(AssertionError, match="disagree"):
        judge.row([result(), result(loss=-0.2)])
    other = replace(GRADIENT, values=GRADIENT.values + 1)
    with pytest.raises(AssertionError, match="disagree on w"):
        assemble([GRADIENT, other])
    with pytest.raises(AssertionError, match="w: values are missing or NaN"):
        assemble([replace(GRADIENT, values=GRADIENT.values[:2])])


def test_pieces_of_a_gradient_are_put_together():
    top = replace(GRADIENT, values=GRADIENT.values[:1])
    rest = replace(GRADIENT, start=(1, 0), values=GRADIENT.values[1:])
    assert torch.equal(assemble([rest, top])["w"], torch.from_numpy(GRADIENT.values))


def test_a_missing_gradient_is_infinitely_far():
    one, two = {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(2)}
    assert gradient_error(one, two) == float("inf")
    assert gradient_error(two, two) == 0.0
