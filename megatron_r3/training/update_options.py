"""The options of the policy update: loss, old policy, mini-steps, routes; and what is refused."""

from __future__ import annotations

import importlib
import math
import os
import sys
from pathlib import Path
from typing import Any

from megatron_r3.guests.moves import LEAST_TOKENS
from megatron_r3.training.losses import policy
from megatron_r3.training.losses.advantages import ADVANTAGES
from megatron_r3.training.losses.aggregation import AGGREGATIONS
from megatron_r3.training.losses.correction import CORRECTIONS, LEVELS, CorrectionOptions
from megatron_r3.training.losses.loss import LossOptions
from megatron_r3.training.losses.policy import LOSSES, Clip
from megatron_r3.training.schedule import SOURCES, STORED, Schedule, UseOfRollouts

# The clip ranges and bounds of the papers, where the options do not name others.
_CLIP = {
    "gspo": Clip(3e-4, 4e-4),  # arXiv 2507.18071, section 5.1
    "cispo": Clip(1.0, 0.2),  # no lower bound: arXiv 2506.13585, section 3.1
}
_AGGREGATION = {"gspo": "sequence-mean"}  # arXiv 2507.18071, equation 5: all responses weigh alike
# Options of whose routes are taken, and of how routes are replayed; each with its default.
_OF_SOURCES: dict[str, object] = dict.fromkeys(
    ("moe_router_replay_source", "moe_router_replay_max_lag", "moe_router_replay_stale_source")
)
_INTERVAL = "moe_router_replay_log_mismatch_interval"
_OF_REPLAY: dict[str, object] = {
    "moe_router_replay_fused_gate": None,
    "moe_router_replay_missing": "live",
    "moe_router_replay_aux_loss": "replayed",
    "moe_router_replay_expert_bias": "replayed",
    "moe_router_replay_dispatch_plan": True,
    "moe_router_replay_verify_plan": False,
    "moe_router_replay_verify_dispatch": False,
    "moe_router_replay_guest_slots": 0,
    "moe_router_replay_guest_domain": None,
    "moe_router_replay_guest_tokens": LEAST_TOKENS,
}
_BOUNDS = {"tis": (0.0, 2.0), "icepop": (0.5, 5.0), "mask": (0.5, 2.0)}


def read_loss(args: Any) -> LossOptions:
    """The loss that Megatron's validated arguments ask for.

    Raises:
        ValueError: naming the option.
    """
    if args.rollouts_loss_module is not None:
        _import_losses(args.rollouts_loss_module)
    name = _one_of(args, "rollouts_loss", LOSSES, "grpo")
    if args.rollouts_loss_module is not None and LOSSES[name].__module__ == policy.__name__:
        others = [n for n, loss in LOSSES.items() if loss.__module__ != policy.__name__]
        raise ValueError(
            f"--rollouts-loss-module {args.rollouts_loss_module} does nothing with --rollouts-loss "
            f"{name}, which megatron-r3 brings: choose one of the module's own "
            f"({', '.join(others) or 'it registers none'}), or leave the option out"
        )
    usual = _CLIP.get(name, Clip())
    low = usual.low if args.rollouts_clip_eps is None else args.rollouts_clip_eps
    high = usual.high if args.rollouts_clip_eps is None else args.rollouts_clip_eps
    if args.rollouts_clip_eps_high is not None:
        high = args.rollouts_clip_eps_high
    if not 0 < low <= 1:
        raise ValueError(
            f"--rollouts-clip-eps {low:g}: it must be above 0 and at most 1; 1 is no lower bound"
        )
    if not 0 < high < math.inf:
        raise ValueError(f"--rollouts-clip-eps-high {high:g}: it must be a finite number above 0")
    dual = args.rollouts_dual_clip
    if dual is not None and not 1 < dual < math.inf:
        raise ValueError(f"--rollouts-dual-clip {dual:g}: it must be a finite number above 1")
    if dual is not None and name == "cispo":
        raise ValueError(
            "--rollouts-dual-clip does nothing with --rollouts-loss cispo: its weight is bounded "
            "for both signs of an advantage; leave the option out"
        )
    aggregation, fixed_length = _read_aggregation(args, name)
    correction = _read_correction(args)
    _refuse_other_divisor(args, aggregation, correction)
    return LossOptions(
        name=name,
        clip=Clip(low, high, dual),
        aggregation=aggregation,
        fixed_length=fixed_length,
        correction=correction,
    )


def read_use(args: Any) -> UseOfRollouts:
    """What Megatron's validated arguments, which `refuse_update` has seen, ask of the rollouts."""
    mini_steps, epochs = args.rollouts_mini_steps or 1, args.rollouts_epochs or 1
    source = args.moe_router_replay_source or "rollout"
    return UseOfRollouts(
        args.seq_length,
        Schedule(args.global_batch_size, mini_steps, epochs, args.rollouts_shuffle),
        advantages=args.rollouts_advantages or "group-normalised",
        source=source if args.moe_router_replay else "live",
        stale_source=args.moe_router_replay_stale_source or "live",
        replay_max_lag=args.moe_router_replay_max_lag,
    )


def refuse_update(args: Any) -> None:
    """Refuse options of the update that could not do what they say.

    Raises:
        ValueError: naming the options.
    """
    _one_of(args, "rollouts_advantages", (*ADVANTAGES, STORED), "group-normalised")
    _one_of(args, "rollouts_old_policy", ("sampler", "trainer"), "sampler")
    for name in ("rollouts_mini_steps", "rollouts_epochs"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"{_flag(name)} {getattr(args, name)}: it must be 1 or more")
    steps = (args.rollouts_mini_steps or 1) * (args.rollouts_epochs or 1)
    if steps > 1 and args.dataloader_type not in (None, "single"):
        raise ValueError(
            f"--rollouts-mini-steps and --rollouts-epochs need --dataloader-type single, not "
            f"{args.dataloader_type}: a collection is a run of rollouts in the order of the store"
        )
    for name in ("rampup_batch_size", "decrease_batch_size_if_needed"):
        if steps > 1 and getattr(args, name, None):
            raise ValueError(
                f"--rollouts-mini-steps and --rollouts-epochs not together with {_flag(name)}: a "
                "collection has one size"
            )
    _refuse_shuffle(args)
    correction = args.rollouts_correction or "none"
    if correction != "none" and args.rollouts_old_policy != "trainer":
        raise ValueError(
            f"--rollouts-correction {correction} needs --rollouts-old-policy trainer: with the "
            "sampler as the old policy there is no difference between the two to correct"
        )
    _refuse_log(args.rollouts_log)
    _refuse_routes(args)


def _refuse_log(name: str | None) -> None:
    """Refuse a log that the first step could not write."""
    if name is None:
        return
    file = Path(name).resolve()
    if file.is_dir():
        raise ValueError(f"--rollouts-log {name}: it is a folder; name a file in it")
    if not file.parent.is_dir():
        raise ValueError(f"--rollouts-log {name}: there is no such folder; make it first")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"--rollouts-log {name}: it cannot be written; name another file")


def _refuse_shuffle(args: Any) -> None:
    """Refuse --rollouts-shuffle where another order inside a step would be another loss."""
    seed = args.rollouts_shuffle
    if seed is None:
        return
    option = f"--rollouts-shuffle {seed}"
    if seed < 0:
        raise ValueError(f"{option}: a seed is 0 or more")
    if args.dataloader_type not in (None, "single"):
        raise ValueError(
            f"{option} needs --dataloader-type single, not {args.dataloader_type}: it mixes the "
            "rollouts of each global batch, which are a run of rollouts in the order of the store"
        )
    for name in ("rampup_batch_size", "decrease_batch_size_if_needed"):
        if getattr(args, name, None):
            raise ValueError(
                f"{option}: not together with {_flag(name)}: a global batch has one size"
            )
    if not args.calculate_per_token_loss and (args.micro_batch_size > 1 or args.rollouts_pack):
        several = "those of a pack" if args.rollouts_pack else f"{args.micro_batch_size} rollouts"
        raise ValueError(
            f"{option} needs --calculate-per-token-loss, or one rollout in a micro-batch: here "
            f"{several} are averaged together, so another order would weigh tokens otherwise"
        )
    for kind, coefficient in _aux_coefficients(args):
        if coefficient and kind in ("aux_loss", "global_aux_loss"):
            raise ValueError(
                f"{option}: not together with --moe-router-load-balancing-type {kind} and "
                "--moe-aux-loss-coeff: that loss depends on which rollouts are in one micro-batch; "
                "leave one of the three out"
            )


def _refuse_routes(args: Any) -> None:
    """Refuse options of whose routes are taken that could not do what they say."""
    source = _one_of(args, "moe_router_replay_source", SOURCES, "rollout")
    _one_of(args, "moe_router_replay_stale_source", SOURCES[1:], "live")
    for name, default in (_OF_SOURCES | _OF_REPLAY).items():
        value = getattr(args, name, default)
        if value != default and (why := _does_nothing(args, name, source)):
            given = _flag(name) if value is True else f"{_flag(name)} {value}"
            if value is False:
                given = f"--no{_flag(name)[1:]}"
            raise ValueError(f"{given} {why}")
    max_lag = args.moe_router_replay_max_lag
    if max_lag is not None and max_lag < 0:
        raise ValueError(f"--moe-router-replay-max-lag {max_lag}: it must be 0 or more versions")
    if max_lag is not None and source != "rollout":
        raise ValueError(
            f"--moe-router-replay-max-lag with --moe-router-replay-source {source}: no rollout's "
            "own routes are taken, so none can be too old for that"
        )
    if args.moe_router_replay_stale_source is not None and max_lag is None:
        raise ValueError("--moe-router-replay-stale-source needs --moe-router-replay-max-lag")


def _does_nothing(args: Any, name: str, source: str) -> str:
    """Why an option of `_OF_SOURCES` or `_OF_REPLAY` would do nothing; empty if it would not."""
    option = name.removeprefix("moe_router_replay_")
    if option == "verify_dispatch":  # what routes live is compared too
        never = args.moe_router_replay_log_mismatch_interval == 0
        return f"does nothing with {_flag(_INTERVAL)} 0, which compares nothing" if never else ""
    if not args.moe_router_replay:
        return "needs --moe-router-replay"
    of_source = f"does nothing with --moe-router-replay-source {source}"
    if source == "live" and name in _OF_REPLAY:
        return f"{of_source}, which replays no route: leave one of the two out"
    if option == "missing" and source != "rollout":
        return f"{of_source}, which takes no rollout's own routes: leave one of the two out"
    if option == "verify_plan" and not args.moe_router_replay_dispatch_plan:
        return "does nothing with --no-moe-router-replay-dispatch-plan: leave one of the two out"
    if option in ("guest_domain", "guest_tokens") and not args.moe_router_replay_guest_slots:
        return "needs --moe-router-replay-guest-slots"
    return ""


def _read_aggregation(args: Any, loss: str) -> tuple[str, int]:
    """How the loss of tokens is averaged, and what fixed-length divides by."""
    usual = _AGGREGATION.get(loss, "token-mean")
    name = _one_of(args, "rollouts_aggregation", AGGREGATIONS, usual)
    length = args.rollouts_fixed_length
    if length is not None and name != "fixed-length":
        raise ValueError("--rollouts-fixed-length needs --rollouts-aggregation fixed-length")
    if length is not None and length < 1:
        raise ValueError(f"--rollouts-fixed-length {length}: it must be 1 or more tokens")
    if name == "fixed-length" and length is None and args.rollouts_pack:
        raise ValueError(
            "--rollouts-aggregation fixed-length with --rollouts-pack needs "
            "--rollouts-fixed-length: --seq-length is the length of a pack, not of a rollout"
        )
    return name, args.seq_length if length is None else length


def _refuse_other_divisor(args: Any, aggregation: str, correction: CorrectionOptions) -> None:
    """Refuse a policy loss that is not divided by all response tokens beside other losses."""
    others = _other_losses(args) if args.calculate_per_token_loss else []
    if not others:
        return
    if aggregation != "token-mean":
        option, divisor = f"--rollouts-aggregation {aggregation}", "the number of rollouts"
    elif correction.name == "mask":
        option, divisor = "--rollouts-correction mask", "the tokens that are left"
    else:
        return
    raise ValueError(
        f"{option}: not together with --calculate-per-token-loss and {others[0]}: Megatron would "
        f"divide that loss, too, by {divisor} instead of all response tokens; leave one of the "
        "three out"
    )


def _other_losses(args: Any) -> list[str]:
    """The options of losses that Megatron adds to the policy loss, and scales for its divisor.

    With --calculate-per-token-loss a router's auxiliary loss, its z-loss and the loss of MTP layers
    are multiplied by a number of tokens, because all gradients are divided by such a number later.
    """
    names = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "mtp_loss_scaling_factor")
    z, mtp = (getattr(args, name, None) for name in names[1:])
    is_on = (
        any(coefficient for kind, coefficient in _aux_coefficients(args) if "aux_loss" in kind),
        z,
        getattr(args, "mtp_num_layers", None) and mtp,
    )
    return [_flag(name) for name, on in zip(names, is_on, strict=True) if on]


def _aux_coefficients(args: Any) -> list[tuple[str, float]]:
    """The kinds of load balancing that are asked for, each with its coefficient.

    Both options are one value or a list. Megatron refuses lists of different lengths later.
    """
    kinds = getattr(args, "moe_router_load_balancing_type", None) or []
    coefficients = getattr(args, "moe_aux_loss_coeff", None) or 0.0
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(coefficients, list):
        coefficients = [coefficients] * len(kinds)
    return list(zip(kinds, coefficients, strict=False))


def _read_correction(args: Any) -> CorrectionOptions:
    name = _one_of(args, "rollouts_correction", CORRECTIONS, "none")
    level = _one_of(args, "rollouts_correction_level", LEVELS, "token")
    bounds = args.rollouts_correction_bounds
    if name == "none":
        for given in ("rollouts_correction_level", "rollouts_correction_bounds"):
            if getattr(args, given) is not None:
                raise ValueError(f"{_flag(given)} does nothing without --rollouts-correction")
        return CorrectionOptions()
    low, high = _BOUNDS[name] if bounds is None else _two(name, bounds)
    if not 0 <= low < high < math.inf:
        given = " ".join(f"{bound:g}" for bound in bounds or ())
        raise ValueError(
            f"--rollouts-correction-bounds {given}: bounds must be finite, and 0 <= lower < upper"
        )
    return CorrectionOptions(name, level, low, high)


def _two(name: str, bounds: list[float]) -> tuple[float, float]:
    """The lower and the upper bound. tis has an upper one alone."""
    expected = 1 if name == "tis" else 2
    if len(bounds) != expected:
        what = "one number, the upper bound" if name == "tis" else "a lower and an upper bound"
        raise ValueError(f"--rollouts-correction-bounds: {name} takes {what}")
    return (0.0, bounds[0]) if name == "tis" else (bounds[0], bounds[1])


def _one_of(args: Any, name: str, known: Any, default: str) -> str:
    given = getattr(args, name)
    if given is not None and given not in known:
        raise ValueError(f"{_flag(name)} {given}: it must be one of {', '.join(known)}")
    return default if given is None else str(given)


def _import_losses(module: str) -> None:
    """Import the user's module, which puts its losses into the table.

    Raises:
        ValueError: there is no such module, or it raises.
    """
    if os.getcwd() not in sys.path:
        # `python -m` puts the working directory there, a script that is named by its path does not.
        sys.path.insert(0, os.getcwd())
    try:
        importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything
        first_line = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"--rollouts-loss-module {module}: cannot be imported: {type(error).__name__}: "
            f"{first_line}"
        ) from error


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
