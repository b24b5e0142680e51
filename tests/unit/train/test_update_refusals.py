"""Options of the policy update that could not do what they say, and what is refused of them.

The rules of the table of options are tried in test_option_table.py.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
from training_arguments import TOKENS, TRAINER, update_options_of

from megatron_r3.train import update_options

AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-3}


def aux_losses(kinds: object, coefficients: object) -> dict[str, object]:
    return {"moe_router_load_balancing_type": kinds, "moe_aux_loss_coeff": coefficients}


UNWRITABLE = str(Path(update_options.__file__).resolve())
NAN, INFINITE = float("nan"), float("inf")
PACK = {"rollouts_pack": True, "micro_batch_size": 1}
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
    ({"rollouts_log": "no-such-folder/log.jsonl"}, "--rollouts-log .*: its folder does not exist"),
    ({"rollouts_log": f"{__file__}/log"}, "--rollouts-log .*py/log: its folder does not exist"),
    ({"rollouts_log": "."}, r"--rollouts-log \.: it is a folder; name a file in it"),
    ({"rollouts_log": UNWRITABLE}, "--rollouts-log .*options.py: it cannot be written; name ano"),
    (
        {"rollouts_reference": "no-such-folder", "rollouts_kl_coeff": 0.1},
        "--rollouts-reference no-such-folder: it has neither a config.json of transformers nor a ",
    ),
    ({"rollouts_entropy_coeff": INFINITE}, "--rollouts-entropy-coeff inf: it must be a finite"),
    (
        {"rollouts_reference": "saved", "rollouts_kl_coeff": 0.1, "save": "./saved"},
        "--rollouts-reference saved: it is the folder of --save",
    ),
    ({"rollouts_loss": "ppo"}, "--rollouts-loss ppo: it must be one of grpo, gspo, cispo"),
    (
        {"rollouts_aggregation": "fixed-length", **PACK},
        "--rollouts-aggregation fixed-length with --rollouts-pack needs --rollouts-fixed-length",
    ),
    *(
        (
            {**change, **TOKENS, **more},
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
                "the number of tokens left",
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
    *(
        (
            {"rollouts_correction": name, "rollouts_correction_bounds": bounds, **TRAINER},
            f"-bounds {' '.join(f'{bound:g}' for bound in bounds)}: {name} takes {count}",
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
    (
        {"rollouts_shuffle": 1, "micro_batch_size": 2},
        "--rollouts-shuffle 1 needs --calculate-per-token-loss, .*: here 2 rollouts are averaged",
    ),
    (
        {"rollouts_shuffle": 1, "micro_batch_size": 1, "rollouts_pack": True},
        "--rollouts-shuffle 1 needs --calculate-per-token-loss, .*: here the rollouts of a pack",
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
    assert update_options_of(rollouts_shuffle=3, **change).use.schedule.seed == 3


@pytest.fixture(autouse=True)
def _unwritable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests as root may write everywhere, but for this file."""
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != UNWRITABLE)


@pytest.mark.parametrize(
    "change",
    [
        {"moe_router_replay_source": "old-policy", "moe_router_replay_aux_loss": "live"},
        {"moe_router_replay_missing": "error", "moe_router_replay_verify_plan": True},
        {"moe_router_replay_verify_dispatch": True, "moe_router_replay_source": "live"},
        {"moe_router_replay_verify_dispatch": True, "moe_router_replay": False},
        {"moe_router_replay_guest_domain": 8, "moe_router_replay_guest_slots": 2},
        {"rollouts_log": __file__},
        {"rollouts_log": "log-of-a-training"},
    ],
)
def test_options_that_do_something_are_taken(change: dict[str, object]) -> None:
    update_options_of(**change)


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_could_not_do_what_it_says_is_refused(change: dict[str, object], message: str) -> None:
    update_options_of()  # the same arguments without the change are taken
    with pytest.raises(ValueError, match=message) as refusal:
        update_options_of(**change)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "change",
    [
        {"moe_aux_loss_coeff": 1e-3, "moe_router_load_balancing_type": "none", **TOKENS},
        {"moe_aux_loss_coeff": 1e-3},  # Megatron divides the policy loss alone
        {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.0, **TOKENS},
        TOKENS,
    ],
)
def test_an_average_over_rollouts_goes_with_other_losses_that_it_does_not_scale(change):
    assert update_options_of(rollouts_aggregation="sequence-mean", **change).loss
    assert update_options_of(rollouts_correction="mask", **TRAINER, **change).loss
    assert update_options_of(moe_z_loss_coeff=1.0, **TOKENS).loss.aggregation == "token-mean"
    zero_weight = update_options_of(
        rollouts_correction="icepop", **TRAINER, moe_z_loss_coeff=1.0, **TOKENS
    )
    assert zero_weight.loss.correction.name == "icepop"  # its tokens stay in the divisor


def test_every_refusal_is_tried() -> None:
    """Each `raise` of the module is the end of one case above, or of one with a user's module."""
    file = update_options.__file__
    raised = set()
    modules = ("no_such_module", "json")  # the second one registers no loss
    for change, _ in [*REFUSED, *(({"rollouts_loss_module": name}, "") for name in modules)]:
        with pytest.raises(ValueError) as refusal:
            update_options_of(**change)
        raised |= {e.lineno + 1 for e in refusal.traceback if str(e.path) == file}
    tree = ast.parse(Path(file).read_text())
    lines = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    assert lines <= raised
