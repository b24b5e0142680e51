"""The options of the policy update: what they mean when they are absent, and what is refused."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from training_arguments import ARGUMENTS

from megatron_r3.training import update_options
from megatron_r3.training.losses.correction import CorrectionOptions
from megatron_r3.training.losses.loss import LossOptions
from megatron_r3.training.losses.policy import LOSSES, Clip
from megatron_r3.training.options import RolloutOptions
from megatron_r3.training.schedule import Schedule, UseOfRollouts

MXFP8 = "reuse_grad_buf_for_mxfp8_param_ag"


def options(**changes: object) -> RolloutOptions:
    known = {*ARGUMENTS, "rampup_batch_size", "decrease_batch_size_if_needed", MXFP8}
    known |= {f"moe_router_replay_guest_{name}" for name in ("slots", "domain", "tokens")}
    assert changes.keys() <= known
    return RolloutOptions.from_args(SimpleNamespace(**{**ARGUMENTS, **changes}))


TRAINER = {"rollouts_old_policy": "trainer"}
TOKENS = {"calculate_per_token_loss": True}
AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-3}


def aux_losses(kinds: object, coefficients: object) -> dict[str, object]:
    return {"moe_router_load_balancing_type": kinds, "moe_aux_loss_coeff": coefficients}


def test_without_replay_no_token_takes_the_routes_of_its_rollout() -> None:
    assert options().use.source == "rollout"
    assert options(moe_router_replay=False).use.source == "live"


def test_without_an_option_the_loss_is_the_one_before_there_were_any() -> None:
    read = options()
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
    assert options(**change).loss.clip == clip


def test_gspo_weighs_responses_alike_unless_told_otherwise() -> None:
    assert options(rollouts_loss="gspo").loss.aggregation == "sequence-mean"
    given = options(rollouts_loss="gspo", rollouts_aggregation="token-mean")
    assert given.loss.aggregation == "token-mean"


def test_a_pass_before_mxfp8_weights_are_copied_is_refused() -> None:
    two = {**TRAINER, "rollouts_mini_steps": 2}
    with pytest.raises(ValueError, match="--reuse-grad-buf-for-mxfp8-param-ag not together with"):
        options(**two, **{MXFP8: True})
    assert options(**TRAINER, **{MXFP8: True}).trainer_is_old  # one update: there is no pass


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
def test_corrections(
    name: str, bounds: list[float] | None, read: tuple[float, float], level: str | None
) -> None:
    got = options(
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
        (
            {"rollouts_aggregation": "fixed-length", "rollouts_fixed_length": 9},
            "fixed-length",
            9,
        ),
    ],
)
def test_averages(change: dict[str, object], name: str, length: int) -> None:
    loss = options(**change).loss
    assert (loss.aggregation, loss.fixed_length) == (name, length)


def test_how_the_rollouts_are_used() -> None:
    read = options(
        rollouts_mini_steps=4,
        rollouts_epochs=2,
        rollouts_advantages="stored",
        moe_router_replay_source="old-policy",
        **TRAINER,
    )
    assert read.use == UseOfRollouts(64, Schedule(8, 4, 2), 0, "stored", "old-policy")
    assert read.needs_old_pass
    lag = options(moe_router_replay_max_lag=0, moe_router_replay_stale_source="old-policy")
    assert (lag.use.replay_max_lag, lag.use.stale_source) == (0, "old-policy")
    assert not lag.needs_old_pass  # one update: its own choice is that of the old policy


NAN, INFINITE = float("nan"), float("inf")
PACK = {"rollouts_pack": True, "micro_batch_size": 1}
PER_TOKEN = {"calculate_per_token_loss": True}
REFUSED: list[tuple[dict[str, object], str]] = [
    *(
        ({"rollouts_clip_eps": bad}, "--rollouts-clip-eps .*: it must be above 0 and at most 1")
        for bad in (0.0, -0.1, 1.5, NAN)
    ),
    *(
        (
            {"rollouts_clip_eps_high": bad},
            "--rollouts-clip-eps-high .*: it must be a finite number above 0",
        )
        for bad in (0.0, -1.0, NAN, INFINITE)
    ),
    *(
        ({"rollouts_dual_clip": bad}, "--rollouts-dual-clip .*: it must be a finite number above 1")
        for bad in (1.0, 0.5, -3.0, NAN, INFINITE)
    ),
    ({"rollouts_dual_clip": 3.0, "rollouts_loss": "cispo"}, "--rollouts-dual-clip does nothing"),
    ({"rollouts_log": "no-such-folder/log.jsonl"}, "--rollouts-log .*: there is no such folder"),
    ({"rollouts_loss": "ppo"}, "--rollouts-loss ppo: it must be one of grpo, gspo, cispo"),
    ({"rollouts_old_policy": "both"}, "--rollouts-old-policy both: .* sampler, trainer"),
    ({"rollouts_aggregation": "mean"}, "--rollouts-aggregation mean: it must be one of token-mean"),
    ({"rollouts_fixed_length": 9}, "--rollouts-fixed-length needs --rollouts-aggregation fixed-"),
    (
        {"rollouts_fixed_length": 0, "rollouts_aggregation": "fixed-length"},
        "--rollouts-fixed-length 0: it must be 1 or more tokens",
    ),
    (
        {"rollouts_aggregation": "fixed-length", **PACK},
        "--rollouts-aggregation fixed-length with --rollouts-pack needs --rollouts-fixed-length",
    ),
    *(
        (
            {**change, **PER_TOKEN, **more},
            f"{refused}: .*--calculate-per-token-loss and {option}: .* by {divisor} instead",
        )
        for change, refused, divisor in (
            *(
                (
                    {"rollouts_aggregation": n},
                    f"--rollouts-aggregation {n}",
                    "the number of rollouts",
                )
                for n in ("sequence-mean", "fixed-length")
            ),
            (
                {"rollouts_correction": "mask", **TRAINER},
                "--rollouts-correction mask",
                "the tokens that are left",
            ),
        )
        for more, option in (
            ({"moe_aux_loss_coeff": 1e-3}, "--moe-aux-loss-coeff"),
            (
                {
                    "moe_aux_loss_coeff": [0.0, 1e-3],
                    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
                },
                "--moe-aux-loss-coeff",
            ),
            ({"moe_z_loss_coeff": 1e-3}, "--moe-z-loss-coeff"),
            ({"mtp_num_layers": 1}, "--mtp-loss-scaling-factor"),
        )
    ),
    ({"rollouts_advantages": "gae"}, "--rollouts-advantages gae: .*group-centred, stored"),
    ({"rollouts_correction": "clip", **TRAINER}, "--rollouts-correction clip: .*icepop, mask"),
    ({"rollouts_correction": "tis"}, "--rollouts-correction tis needs --rollouts-old-policy tr"),
    (
        {"rollouts_correction": "tis", "rollouts_old_policy": "sampler"},
        "--rollouts-correction tis needs --rollouts-old-policy trainer",
    ),
    ({"rollouts_correction_level": "token"}, "--rollouts-correction-level does nothing without"),
    ({"rollouts_correction_bounds": [2.0]}, "--rollouts-correction-bounds does nothing without"),
    (
        {"rollouts_correction": "tis", "rollouts_correction_level": "turn", **TRAINER},
        "--rollouts-correction-level turn: it must be one of token, sequence",
    ),
    *(
        (
            {"rollouts_correction": name, "rollouts_correction_bounds": bounds, **TRAINER},
            f"--rollouts-correction-bounds: {name} takes {count}",
        )
        for name, bounds, count in (
            ("tis", [0.5, 2.0], "one number, the upper bound"),
            ("icepop", [2.0], "a lower and an upper bound"),
            ("mask", [0.1, 0.5, 2.0], "a lower and an upper bound"),
        )
    ),
    *(
        (
            {"rollouts_correction": "mask", "rollouts_correction_bounds": bounds, **TRAINER},
            "--rollouts-correction-bounds .*: bounds must be finite, and 0 <= lower < upper",
        )
        for bounds in ([2.0, 0.5], [1.0, 1.0], [-1.0, 1.0], [0.5, INFINITE], [NAN, 1.0])
    ),
    ({"rollouts_log": "/no/such/folder/log"}, "--rollouts-log /no/.*: there is no such folder"),
    ({"rollouts_mini_steps": 0}, "--rollouts-mini-steps 0: it must be 1 or more"),
    ({"rollouts_epochs": -1}, "--rollouts-epochs -1: it must be 1 or more"),
    ({"rollouts_epochs": 2, "dataloader_type": "cyclic"}, "--rollouts-epochs need --dataloader-t"),
    ({"rollouts_shuffle": -1, **TOKENS}, "--rollouts-shuffle -1: a seed is 0 or more"),
    (
        {"rollouts_shuffle": 1, **TOKENS, "dataloader_type": "cyclic"},
        "--rollouts-shuffle 1 needs --dataloader-type single, not cyclic",
    ),
    (
        {"rollouts_shuffle": 1, **TOKENS, "rampup_batch_size": [4, 4, 64]},
        "--rollouts-shuffle 1: not together with --rampup-batch-size: a global batch has one size",
    ),
    (
        {"rollouts_shuffle": 1, "micro_batch_size": 2},
        "--rollouts-shuffle 1 needs --calculate-per-token-loss, .*: here 2 rollouts are averaged",
    ),
    (
        {"rollouts_shuffle": 1, "micro_batch_size": 1, "rollouts_pack": True},
        "--rollouts-shuffle 1 needs --calculate-per-token-loss, .*: here those of a pack are",
    ),
    (
        {"rollouts_shuffle": 1, **TOKENS, **AUX},
        "--rollouts-shuffle 1: not together with --moe-router-load-balancing-type aux_loss and",
    ),
    *(
        (
            {"rollouts_shuffle": 1, **TOKENS, **aux_losses(kinds, coefficients)},
            f"not together with --moe-router-load-balancing-type {named} and --moe-aux-loss-coeff",
        )
        for kinds, coefficients, named in (
            (["seq_aux_loss", "global_aux_loss"], [0.0, 1e-3], "global_aux_loss"),
            (["aux_loss", "aux_loss"], [1e-3, 0.0], "aux_loss"),
        )
    ),
    (
        {"rollouts_mini_steps": 2, "rampup_batch_size": [4, 4, 64]},
        "--rollouts-mini-steps and --rollouts-epochs not together with --rampup-batch-size",
    ),
    (
        {"rollouts_epochs": 2, "decrease_batch_size_if_needed": True},
        "--rollouts-epochs not together with --decrease-batch-size-if-needed: a collection has",
    ),
    ({"moe_router_replay_source": "r2"}, "--moe-router-replay-source r2: it must be one of"),
    (
        {"moe_router_replay_stale_source": "rollout", "moe_router_replay_max_lag": 1},
        "--moe-router-replay-stale-source rollout: it must be one of old-policy, live",
    ),
    *(
        ({name: value, "moe_router_replay": False}, f"--{name.replace('_', '-')} needs --moe-r")
        for name, value in (
            ("moe_router_replay_source", "live"),
            ("moe_router_replay_max_lag", 1),
            ("moe_router_replay_stale_source", "live"),
        )
    ),
    (
        {"moe_router_replay_guest_slots": 2, "moe_router_replay": False},
        "--moe-router-replay-guest-slots 2 needs --moe-router-replay",
    ),
    (
        {"moe_router_replay_guest_domain": 8, "moe_router_replay": False},
        "--moe-router-replay-guest-domain 8 needs --moe-router-replay",
    ),
    (
        {"moe_router_replay_guest_tokens": 512, "moe_router_replay": False},
        "--moe-router-replay-guest-tokens 512 needs --moe-router-replay",
    ),
    ({"moe_router_replay_max_lag": -1}, "--moe-router-replay-max-lag -1: it must be 0 or more"),
    (
        {"moe_router_replay_max_lag": 1, "moe_router_replay_source": "live"},
        "--moe-router-replay-max-lag with --moe-router-replay-source live: no rollout's own",
    ),
    (
        {"moe_router_replay_stale_source": "live"},
        "--moe-router-replay-stale-source needs --moe-router-replay-max-lag",
    ),
]


@pytest.mark.parametrize(
    "change",
    [
        {"micro_batch_size": 1},
        {"micro_batch_size": 4, **TOKENS},
        {"micro_batch_size": 1, "rollouts_pack": True, **TOKENS},
        {**TOKENS, **aux_losses("aux_loss", 0.0)},
        {**TOKENS, **aux_losses("seq_aux_loss", 1e-3)},
        {**TOKENS, **aux_losses(["seq_aux_loss", "aux_loss"], [1e-3, 0.0])},
        {**TOKENS, **aux_losses("none", 1e-3)},
    ],
)
def test_a_shuffle_that_changes_no_loss_is_taken(change: dict[str, object]) -> None:
    assert options(rollouts_shuffle=3, **change).use.schedule.seed == 3


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_could_not_do_what_it_says_is_refused(change: dict[str, object], message: str) -> None:
    options()  # the same arguments without the change are taken
    with pytest.raises(ValueError, match=message) as refusal:
        options(**change)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "change",
    [
        {"moe_aux_loss_coeff": 1e-3, "moe_router_load_balancing_type": "none", **PER_TOKEN},
        {"moe_aux_loss_coeff": 1e-3},  # Megatron divides the policy loss alone
        {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.0, **PER_TOKEN},
        PER_TOKEN,
    ],
)
def test_an_average_over_rollouts_goes_with_other_losses_that_it_does_not_scale(
    change: dict[str, object],
) -> None:
    assert options(rollouts_aggregation="sequence-mean", **change).loss
    assert options(rollouts_correction="mask", **TRAINER, **change).loss
    assert options(moe_z_loss_coeff=1.0, **PER_TOKEN).loss.aggregation == "token-mean"
    zero_weight = options(
        rollouts_correction="icepop", **TRAINER, moe_z_loss_coeff=1.0, **PER_TOKEN
    )
    assert zero_weight.loss.correction.name == "icepop"  # its tokens stay in the divisor


def test_every_refusal_is_tried() -> None:
    """Each `raise` of the module is the end of one case above, or of one with a user's module."""
    file = update_options.__file__
    raised = set()
    for change, _ in [*REFUSED, ({"rollouts_loss_module": "no_such_module"}, "")]:
        with pytest.raises(ValueError) as refusal:
            options(**change)
        raised |= {e.lineno + 1 for e in refusal.traceback if str(e.path) == file}
    tree = ast.parse(Path(file).read_text())
    lines = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    assert lines <= raised


MODULE = """
from megatron_r3.training.losses.policy import Gain, policy_loss_named

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
    assert options(rollouts_loss="reinforce", rollouts_loss_module="my_losses").loss == LossOptions(
        "reinforce", fixed_length=64
    )
    assert options(rollouts_loss_module="my_losses").loss.name == "grpo"  # it is not chosen


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
def test_a_module_that_cannot_be_imported_is_one_line(
    users_module: Path, text: str | None, message: str
) -> None:
    if text is not None:
        users_module.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        options(rollouts_loss_module="my_losses")
    told = str(refusal.value)
    assert told.startswith("--rollouts-loss-module my_losses: cannot be imported: ")
    assert "\n" not in told
