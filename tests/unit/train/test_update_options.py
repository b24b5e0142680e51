"""The options of the policy update: what they mean, also when they are absent."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from training_arguments import MXFP8, TRAINER, update_options_of

from megatron_r3.train.losses.correction import CorrectionOptions
from megatron_r3.train.losses.loss import LossOptions
from megatron_r3.train.losses.policy_loss import LOSSES, Clip
from megatron_r3.train.option_kind import flag
from megatron_r3.train.schedule import Schedule, UseOfRollouts


def test_without_replay_no_token_takes_the_routes_of_its_rollout() -> None:
    assert update_options_of().use.source == "rollout"
    assert update_options_of(moe_router_replay=False).use.source == "live"


def test_without_an_option_the_loss_is_the_one_before_there_were_any() -> None:
    read = update_options_of()
    assert read.loss == LossOptions("grpo", Clip(0.2, 0.2, None), "token-mean", 64)
    assert read.loss.correction == CorrectionOptions("none")
    assert read.use == UseOfRollouts(64, Schedule(8, 1, 1), 0, "group-normalised", "rollout")
    assert not read.trainer_is_old
    assert not read.needs_old_pass


@pytest.mark.parametrize(
    ("change", "clip"),
    [
        ({"rollouts_clip_eps": 0.1}, Clip(0.1, 0.1)),
        ({"rollouts_clip_eps_high": 0.28}, Clip(0.2, 0.28)),
        ({"rollouts_clip_eps": 1.0, "rollouts_clip_eps_high": 4.0}, Clip(1.0, 4.0)),
        ({"rollouts_dual_clip": 3.0}, Clip(0.2, 0.2, 3.0)),
        ({"rollouts_loss": "cispo"}, Clip(1.0, 0.2)),
        ({"rollouts_loss": "cispo", "rollouts_clip_eps_high": 4.0}, Clip(1.0, 4.0)),
        ({"rollouts_loss": "cispo", "rollouts_clip_eps": 0.3}, Clip(0.3, 0.3)),
        ({"rollouts_loss": "gspo"}, Clip(3e-4, 4e-4)),
        ({"rollouts_loss": "gspo", "rollouts_clip_eps": 0.01}, Clip(0.01, 0.01)),
        ({"rollouts_loss": "gspo", "rollouts_clip_eps_high": 0.01}, Clip(3e-4, 0.01)),
    ],
)
def test_clip_ranges(change: dict[str, object], clip: Clip) -> None:
    assert update_options_of(**change).loss.clip == clip


def test_gspo_weighs_responses_alike_unless_told_otherwise() -> None:
    assert update_options_of(rollouts_loss="gspo").loss.aggregation == "sequence-mean"
    given = update_options_of(rollouts_loss="gspo", rollouts_aggregation="token-mean")
    assert given.loss.aggregation == "token-mean"


@pytest.mark.parametrize("name", [MXFP8, "moe_input_jitter_eps"])
def test_what_does_not_go_with_a_pass_of_the_old_policy_is_refused(name: str) -> None:
    two = {**TRAINER, "rollouts_mini_steps": 2}
    with pytest.raises(ValueError, match=f"{flag(name)}: not together with a pass"):
        update_options_of(**two, **{name: True})
    assert update_options_of(**TRAINER, **{name: True}).trainer_is_old  # one update needs no pass


@pytest.mark.parametrize(
    ("name", "bounds", "read"),
    [
        ("tis", None, (0.0, 2.0)),
        ("tis", [5.0], (0.0, 5.0)),
        ("icepop", None, (0.5, 5.0)),
        ("icepop", [0.2, 3.0], (0.2, 3.0)),
        ("mask", None, (0.5, 2.0)),
        ("mask", [0.0, 3.0], (0.0, 3.0)),
    ],
)
@pytest.mark.parametrize("level", [None, "token", "sequence"])
def test_corrections(name, bounds, read, level):
    got = update_options_of(
        rollouts_correction=name,
        rollouts_correction_bounds=bounds,
        rollouts_correction_level=level,
        **TRAINER,
    )
    assert got.loss.correction == CorrectionOptions(name, level or "token", *read)
    assert got.trainer_is_old


@pytest.mark.parametrize(
    ("change", "name", "length"),
    [
        ({"rollouts_aggregation": "sequence-mean"}, "sequence-mean", 64),
        ({"rollouts_aggregation": "fixed-length"}, "fixed-length", 64),
        ({"rollouts_aggregation": "fixed-length", "rollouts_fixed_length": 9}, "fixed-length", 9),
    ],
)
def test_averages(change: dict[str, object], name: str, length: int) -> None:
    loss = update_options_of(**change).loss
    assert (loss.aggregation, loss.fixed_length) == (name, length)


def test_how_the_rollouts_are_used() -> None:
    read = update_options_of(
        rollouts_mini_steps=4,
        rollouts_epochs=2,
        rollouts_advantages="stored",
        moe_router_replay_source="old-policy",
        **TRAINER,
    )
    assert read.use == UseOfRollouts(64, Schedule(8, 4, 2), 0, "stored", "old-policy")
    assert read.needs_old_pass
    lag = update_options_of(
        moe_router_replay_max_lag=0, moe_router_replay_stale_source="old-policy"
    )
    assert (lag.use.replay_max_lag, lag.use.stale_source) == (0, "old-policy")
    assert not lag.needs_old_pass  # one update: its own choice is that of the old policy


MODULE = """
from megatron_r3.train.losses.policy_loss import Gain, policy_loss_named

@policy_loss_named("{name}")
def mine(terms, clip):
    return Gain(terms.advantages_BS * terms.logprobs_BS, terms.log_ratio_BS.exp())
"""


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is imported as `my_losses`; what it registers is gone after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(LOSSES)
    yield tmp_path / "my_losses.py"
    LOSSES.clear()
    LOSSES.update(before)
    sys.modules.pop("my_losses", None)


def test_a_loss_of_the_users_own(users_module: Path) -> None:
    users_module.write_text(MODULE.format(name="reinforce"))
    assert update_options_of(
        rollouts_loss="reinforce", rollouts_loss_module="my_losses"
    ).loss == LossOptions("reinforce", fixed_length=64)
    with pytest.raises(ValueError, match=r"with --rollouts-loss grpo, .*own \(reinforce\), or lea"):
        update_options_of(rollouts_loss_module="my_losses")  # it is not chosen


def test_a_module_without_a_loss_does_nothing(users_module: Path) -> None:
    users_module.write_text("")
    message = r"--rollouts-loss-module my_losses does nothing with .*\(it registers none\)"
    with pytest.raises(ValueError, match=message):
        update_options_of(rollouts_loss_module="my_losses")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "ModuleNotFoundError: No module named 'my_losses'"),
        ("import there_is_no_such_module", "ModuleNotFoundError: No module named 'there_is_no_su"),
        ("def broken(:", "SyntaxError: "),
        ("raise RuntimeError('one\\ntwo')", "RuntimeError: one"),
        ("raise RuntimeError", "RuntimeError: "),
        (MODULE.format(name="gspo"), "ValueError: two policy losses are named 'gspo': give yours"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(users_module, text, message):
    if text is not None:
        users_module.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        update_options_of(rollouts_loss_module="my_losses")
    told = str(refusal.value)
    assert told.startswith("--rollouts-loss-module my_losses: cannot be imported: ")
    assert "\n" not in told
