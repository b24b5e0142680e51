"""Each alarm is raised by its fault in the routes of a tiny model; healthy rows raise none.

Shape suffixes (docs/glossary.md): K, L, N, T, U.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from sampled import (
    EXPERTS,
    LAYERS,
    PROMPT,
    Run,
    compared,
    first_turn,
    moved,
    noisy_routers,
    rollouts,
    run,
    tiny_model,
    with_rows,
)

from megatron_r3.data.rollout import Rollout
from megatron_r3.data.truth import Compared, Report, examine
from megatron_r3.replay.routes import Routes

NAMES = (1, 2, 3, 5)  # what the layers are called in the tables
pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Rig:
    """A model in float32, which is the trainer, and in bfloat16, which samples.

    Attributes:
        given: rollouts with tokens to compare.
        live: the runs of the trainer on these tokens.
        healthy: the sampler's rollouts, each compared with the trainer's run.
    """

    model: Any
    sampler: Any
    given: list[Rollout]
    live: list[Run]
    healthy: list[Compared]


@pytest.fixture(scope="module")
def rig() -> Rig:
    torch.set_num_threads(1)
    model = tiny_model()
    sampler = copy.deepcopy(model).bfloat16()
    given = rollouts()
    live = [run(model, one) for one in given]
    return Rig(model, sampler, given, live, compared(given, [run(sampler, r) for r in given], live))


def examined(given: Sequence[Compared], **more: Any) -> Report:
    return examine(given, NAMES, **more)


def the_alarm(given: Sequence[Compared], cause: str, **more: Any) -> str:
    """The evidence of the alarm that is raised: only one, and with this cause."""
    (alarm,) = examined(given, **more).alarms
    assert alarm.cause == cause, str(alarm)
    assert alarm.action
    return alarm.evidence


Change = Callable[[np.ndarray], np.ndarray]


def changed(given: Sequence[Compared], change: Change, every: int = 1) -> list[Compared]:
    """The rollouts; `change` is applied to the recorded routes of each `every`-th one."""
    return [
        with_rows(one, change(one.rollout.routes.ids_LTK.copy())) if i % every == 0 else one
        for i, one in enumerate(given)
    ]


def test_a_healthy_sampler_raises_none(rig: Rig) -> None:
    report = examined(rig.healthy)
    assert report.alarms == []
    assert all(0 < share.share < 0.1 for share in report.tables.layers.values())
    for size in (1, 2, 4):
        for first in range(0, len(rig.healthy) - size + 1):
            assert examined(rig.healthy[first : first + size]).alarms == []


@pytest.mark.parametrize("scale", [0.02, 0.05, 0.1])
def test_noise_in_the_routers_raises_none(rig: Rig, scale: float) -> None:
    """The noise of scale 0.1 changes a third of all (token, layer) pairs."""
    with noisy_routers(rig.model, scale):
        noisy = compared(rig.given, [run(rig.model, one) for one in rig.given], rig.live)
    report = examined(noisy)
    assert report.alarms == []
    assert report.tables.all_rows.share > 0.05


def test_strong_noise_raises_what_it_is(rig: Rig) -> None:
    with noisy_routers(rig.model, 0.4):
        noisy = compared(rig.given, [run(rig.model, one) for one in rig.given], rig.live)
    evidence = the_alarm(noisy, "the engine computes another model")
    assert evidence.startswith("too many routes differ: 6")
    assert "% in layer 1 (at most 5" in evidence


def constant(ids_LTK: np.ndarray) -> np.ndarray:
    """All tokens have one row, as in a buffer that was never written."""
    ids_LTK[:] = np.arange(4)
    return ids_LTK


def stuck(ids_LTK: np.ndarray) -> np.ndarray:
    """The rows from 40 on are copies of row 39."""
    ids_LTK[:, 40:] = ids_LTK[:, 39:40]
    return ids_LTK


def padded(ids_LTK: np.ndarray) -> np.ndarray:
    """The rows from 45 on are those from 5 on, as padding may leave them."""
    ids_LTK[:, 45:] = ids_LTK[:, 5 : ids_LTK.shape[1] - 40]
    return ids_LTK


def foreign(ids_LTK: np.ndarray) -> np.ndarray:
    """The rows from 32 on are random, like those of an unknown request."""
    random = np.random.default_rng(0).random((*ids_LTK[:, 32:].shape[:2], EXPERTS))
    ids_LTK[:, 32:] = random.argsort(-1)[..., : ids_LTK.shape[-1]]
    return ids_LTK


def renumbered(ids_LTK: np.ndarray) -> np.ndarray:
    """The ids are permuted, like physical ids of experts that an engine has moved."""
    return np.random.default_rng(0).permutation(EXPERTS).astype(np.uint8)[ids_LTK]


def late(tokens: int) -> Change:
    """Each row is that of the token `tokens` places before."""
    return lambda ids_LTK: np.roll(ids_LTK, tokens, 1)


OTHER = "the engine computes another model"
IN_ALL = "in all parts each row has the routes of another token, "
# by name: the change, n (each n-th rollout is changed), the alarm's cause, words of the evidence
FAULTS: dict[str, tuple[Change, int, str, str]] = {
    "zeros": (np.zeros_like, 5, "zeros", "the first is token 0 of rollout 0: [0, 0, 0, 0] in its"),
    "one row": (constant, 1, "one constant row", "rollout 9 the rows from 0 on are all the same"),
    "stuck": (stuck, 4, "one constant row", "in 3 of 10 rollouts are copies; in rollout 8 the "
              "rows from 40 on are all the same as row 39"),
    "padded": (padded, 1, "stale padded rows", "the rows from 45 on are copies of the rows from 5 "
               "on of the same rollout"),
    "1 earlier": (late(1), 1, "shifted rows", f"{IN_ALL}1 token earlier: 9"),
    "1 later": (late(-1), 1, "shifted rows", f"{IN_ALL}1 token later: 9"),
    "3 earlier": (late(3), 1, "shifted rows", f"{IN_ALL}3 tokens earlier: 9"),
    "some": (late(1), 5, "shifted rows", "in 2 of 10 rollouts, the first is rollout 0"),
    "order of layers": (lambda ids_LTK: np.roll(ids_LTK, 1, 0), 1, OTHER, "% in layer 1 (at most"),
    "physical ids": (renumbered, 1, OTHER, "% in layer 2, 2 more, "),
    "from a place on": (foreign, 1, OTHER, "% in positions 32 to 63 (at most "),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_is_planted_is_found_and_named(rig: Rig, name: str) -> None:
    change, every, cause, words = FAULTS[name]
    assert words in the_alarm(changed(rig.healthy, change, every), cause)


def test_shifted_rows_show_in_noise(rig: Rig) -> None:
    with noisy_routers(rig.model, 0.1):
        noisy = compared(rig.given, [run(rig.model, one) for one in rig.given], rig.live)
    the_alarm(changed(noisy, late(1)), "shifted rows")


def test_tokens_that_repeat_are_no_stale_rows(rig: Rig) -> None:
    """Control: if a rollout repeats one token, recorded and live rows are the same everywhere."""
    given = [replace(one, tokens_N=np.full_like(one.tokens_N, 7)) for one in rig.given[:2]]
    given += rig.given[2:]
    live = [run(rig.model, one) for one in given]
    repeated = compared(given, [run(rig.sampler, one) for one in given], live)
    same_T = (repeated[0].codes_LT[:, 1:] == repeated[0].codes_LT[:, :-1]).all(0)
    assert same_T.sum() > 4, "no row repeats: this is no control"
    assert examined(repeated).alarms == []


def test_rows_that_are_lost_at_the_border_of_a_turn(rig: Rig) -> None:
    """The row of the turn's last token is lost when turns are joined, so all later rows move up."""

    def lost(one: Compared) -> Compared:
        ids_LTK = one.rollout.routes.ids_LTK.copy()
        first, end = one.rollout.spans_U2[0].tolist()
        ids_LTK[:, end - 1 : -1] = ids_LTK[:, end:]
        assert first == first_turn(one)
        return with_rows(one, ids_LTK)

    evidence = the_alarm([lost(one) for one in rig.healthy], "shifted rows")
    assert evidence.startswith(
        "from the text before turn 2 on (the prompts, turn 1 fit) each row has the routes of "
        "another token, 1 token later: "
    )


def test_rows_of_another_rollout(rig: Rig) -> None:
    first, second, *others = rig.healthy
    rows = first.num_rows  # `first` is the shorter rollout
    swapped = second.rollout.routes.ids_LTK.copy()
    swapped[:, :rows] = first.rollout.routes.ids_LTK
    given = [
        with_rows(first, second.rollout.routes.ids_LTK[:, :rows]),
        with_rows(second, swapped),
        *others,
    ]
    evidence = the_alarm(given, OTHER)
    assert "% in rollout 0 (at most " in evidence
    assert evidence.endswith("% in rollout 1")


def test_a_prefix_cache_from_before_the_update(rig: Rig) -> None:
    """Keys, values and rows of the prompt are those of the weights before the update."""
    new = moved(rig.model, 0.05)
    given = [replace(one, policy_version=1) for one in rig.given]
    live = [run(new, one) for one in given]
    stale = compared(given, [run(new, one, PROMPT, rig.model) for one in given], live)
    before = [replace(o, before_LTK=r.ids_LTK) for o, r in zip(stale, rig.live, strict=True)]
    evidence = the_alarm(before, "old KV after an update")
    assert evidence.startswith("the rows of prompts are those of the weights before the update: ")
    assert examined(stale).alarms == [], "docs/truth.md says that shares alone miss it"
    # control: the cache was flushed, so recorded and live rows are the same
    fresh = compared(given, live, live)
    flushed = [replace(o, before_LTK=r.ids_LTK) for o, r in zip(fresh, rig.live, strict=True)]
    assert examined(flushed).alarms == []


def test_old_rows_of_prompts_without_the_weights_before(rig: Rig) -> None:
    """Rows of prompts are of the weights before the update; keys and values are new."""
    new = moved(rig.model, 0.05)
    given = [replace(one, policy_version=1) for one in rollouts(10, turns=1)]
    old, live = [run(rig.model, r) for r in given], [run(new, r) for r in given]
    stale = [
        with_rows(one, np.where(one.part_T[:, None] == 0, there.ids_LTK, here.ids_LTK))
        for one, there, here in zip(compared(given, live, live), old, live, strict=True)
    ]
    evidence = the_alarm(stale, "rows of prompts")
    assert "of the routes of prompts differ; allowed are at most " in evidence
    assert "3 times the share of sampled tokens, 0.0 %, plus 1" in evidence


def test_an_update_that_the_engine_did_not_take(rig: Rig) -> None:
    new = moved(rig.model, 0.02)
    given = [replace(one, policy_version=1) for one in rig.given]
    live = [run(new, one) for one in given]
    old = compared(given, rig.live, live)
    before = [replace(o, before_LTK=r.ids_LTK) for o, r in zip(old, rig.live, strict=True)]
    evidence = the_alarm(before, "weights of another version")
    assert evidence.startswith("all rows are those of the weights before the update: 0.0 %")


def test_a_version_that_was_sampled_by_other_weights(rig: Rig) -> None:
    """The live model has the weights of version 1, but version 2 is the newest in the rollouts."""
    new = moved(rig.model, 0.1)
    half = len(rig.given) // 2
    given = [replace(one, policy_version=1 + (i < half)) for i, one in enumerate(rig.given)]
    recorded = [run(new if i < half else rig.sampler, one) for i, one in enumerate(rig.given)]
    evidence = the_alarm(compared(given, recorded, rig.live), "weights of another version")
    assert "differ at policy version 2, the newest; allowed are at most " in evidence
    # control: rollouts of the older version may differ
    given = [replace(one, policy_version=2 - (i < half)) for i, one in enumerate(rig.given)]
    assert examined(compared(given, recorded, rig.live)).alarms == []


def test_one_layer_of_one_expert_is_no_fault() -> None:
    """With one layer of 2 experts and top-1, rows repeat by chance."""
    rng = np.random.default_rng(0)
    given = []
    for one in rollouts():
        live_LTK = rng.integers(0, 2, (1, len(one.tokens_N) - 1, 1))
        flipped = np.where(rng.random(live_LTK.shape) < 0.1, 1 - live_LTK, live_LTK)
        routes = Routes.from_array(flipped, 2)
        given.append(Compared(replace(one, routes=routes), live_LTK))
    assert examine(given, [0]).alarms == []


def test_missing_rows_are_not_compared(rig: Rig) -> None:
    def unrecorded(one: Compared) -> Compared:
        routes = one.rollout.routes
        ids_LTK = routes.ids_LTK.copy()
        recorded_T = np.arange(one.num_rows) < 30
        ids_LTK[:, ~recorded_T] = 0
        routes = replace(routes, ids_LTK=ids_LTK, recorded_T=recorded_T)
        return replace(one, rollout=replace(one.rollout, routes=routes))

    report = examined([unrecorded(one) for one in rig.healthy])
    assert report.alarms == []
    assert report.tables.all_rows.rows == 30 * len(rig.healthy)


def test_other_routes_than_those_of_the_rollout_are_refused(rig: Rig) -> None:
    one = rig.healthy[0]
    with pytest.raises(ValueError, match=r"rollout 0: live routes have the shape \(4, 5, 4\), and"):
        replace(one, live_LTK=one.live_LTK[:, :5])
    with pytest.raises(ValueError, match="no rollouts"):
        examine([], range(LAYERS))
