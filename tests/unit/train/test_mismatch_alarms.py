"""The alarms that a training raises by the shares of a step, and what it logs of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_r3.data.truth.mismatch_tables import Share, Tables
from megatron_r3.train.mismatch import StepAlarms, scalars_of


def step(**parts: object) -> Tables:
    """A healthy step of 2,000 rows in four layers, with the parts that are given."""
    healthy = Tables(
        layers={n: Share(0.01 * n, 1000) for n in (1, 2, 3, 4)},
        positions={n: Share(0.02, 250) for n in range(8)},
        turns={n: Share(0.02, 200) for n in range(5)},
        versions={3: Share(0.02, 500), 4: Share(0.02, 500)},
        prompts=Share(0.02, 1000),
        responses=Share(0.025, 1000),
    )
    return replace(healthy, **parts)  # type: ignore[arg-type]


OTHER = "the engine computes another model"
FAULTS = {
    "prompts": ("rows of prompts", {"prompts": Share(0.4, 1000)}),
    "version": (
        "weights of another version",
        {"versions": {3: Share(0.02, 500), 4: Share(0.5, 500)}},
    ),
    "layer": (OTHER, {"layers": {1: Share(0.02, 500), 2: Share(0.7, 500)}}),
    "turn": (OTHER, {"turns": {0: Share(0.02, 500), 1: Share(0.7, 500)}}),
    "position": (OTHER, {"positions": {3: Share(0.02, 500), 6: Share(0.7, 300)}}),
}


@pytest.mark.parametrize(("cause", "parts"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_said_when_it_begins(cause: str, parts: dict[str, object]) -> None:
    alarms = StepAlarms()
    assert alarms.look(step()) == (0, [])
    count, (alarm,) = alarms.look(step(**parts))
    assert (count, alarm.cause) == (1, cause)
    assert alarms.look(step(**parts)) == (1, []), "it was said in the step before"
    assert alarms.look(step()) == (0, [])
    assert len(alarms.look(step(**parts))[1]) == 1


@pytest.mark.parametrize(("cause", "parts"), FAULTS.values(), ids=FAULTS)
def test_few_rows_are_no_fault(cause: str, parts: dict[str, object]) -> None:
    def few(value: object) -> object:
        if isinstance(value, Share):
            return Share(value.share, 3)
        return {key: Share(share.share, 3) for key, share in value.items()}  # type: ignore[attr-defined]

    assert StepAlarms().look(step(**{name: few(v) for name, v in parts.items()})) == (0, [])


def test_drift_is_no_fault() -> None:
    """A trainer that learns from its rollouts leaves them: from step to step, in all rows."""
    alarms = StepAlarms()
    for share in (0.014, 0.024, 0.066, 0.115, 0.129, 0.141):
        drifted = Tables(
            layers={n: Share(share * n / 2, 1000) for n in (1, 2, 3, 4)},
            positions={n: Share(share, 250) for n in range(8)},
            turns={0: Share(share, 1000)},
            versions={0: Share(1.5 * share, 500), 1: Share(share, 500)},
            prompts=Share(0.7 * share, 1000),
            responses=Share(share, 1000),
        )
        assert alarms.look(drifted) == (0, [])


def test_what_is_logged() -> None:
    scalars = scalars_of(
        step(versions={9: Share(0.1, 5), 5: Share(0.3, 5)}, turns={4: Share(1, 1)})
    )
    assert scalars["router mismatch"] == 0.025
    assert scalars["router mismatch/layer 4"] == 0.04
    assert scalars["router mismatch/position 8 to 15"] == 0.02
    assert scalars["router mismatch/turn 5 or more"] == 1
    assert scalars["router mismatch/lag 0"] == 0.1
    assert scalars["router mismatch/lag 4 or more"] == 0.3
    assert "router mismatch/prompt" not in scalars_of(step(prompts=Share(0.0, 0)))
    assert scalars_of(Tables()) == {}
