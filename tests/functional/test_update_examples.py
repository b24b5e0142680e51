"""The commands of docs/train.md that compare losses train, with the options that stand there."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from training import steps_on, stores, train

PAGE = Path(__file__).parents[2] / "docs" / "train.md"


def options() -> list[list[str]]:
    """What stands behind $ARGS in each command of the section."""
    section = PAGE.read_text().partition("## The policy update")[2]
    block = section.partition("```bash\n")[2].partition("```")[0].replace("\\\n", " ")
    return [
        shlex.split(line.partition("$ARGS ")[2]) for line in block.splitlines() if "$ARGS " in line
    ]


def test_there_are_three() -> None:
    assert [("gspo" in o, "tis" in o) for o in options()] == [
        (False, False),
        (True, False),
        (False, True),
    ]


# what each command is about: without it the training must end in other weights
OPTIONS = ("--rollouts-clip-eps-high", "--rollouts-loss", "--rollouts-correction")


@pytest.mark.parametrize("number", range(3))
def test_a_command_of_the_page_trains(patched, policy, tmp_path, number):
    store = stores(policy, tmp_path, mixed=True)
    argv = steps_on(policy, store, 4, *options()[number])
    if "--moe-router-replay" not in options()[number]:
        argv.remove("--moe-router-replay")  # `steps_on` replays; this command trains live
    (trained,) = patched.run(train, 1, argv, timeout_s=240)
    assert all(bool(weight.isfinite().all()) for weight in trained.values())
    at = argv.index(OPTIONS[number])
    (without,) = patched.run(train, 1, argv[:at] + argv[at + 2 :], timeout_s=240)
    assert any(not torch.equal(trained[name], without[name]) for name in trained)
