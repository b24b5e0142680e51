"""The options of the policy update: loss, old policy, mini-steps, routes; and what is refused."""

from __future__ import annotations

import importlib
import math
import os
import sys
from pathlib import Path
from typing import Any

from megatron_r3.train.losses import policy_loss
from megatron_r3.train.losses.correction import CorrectionOptions
from megatron_r3.train.losses.loss import LossOptions
from megatron_r3.train.losses.penalty import PenaltyOptions
from megatron_r3.train.losses.policy_loss import LOSSES, Clip
from megatron_r3.train.option_table import flag, value
from megatron_r3.train.schedule import Schedule, UseOfRollouts

# Defaults where a loss or a correction has its own: clip ranges, averages, bounds of w.
_CLIP = {
    "gspo": Clip(3e-4, 4e-4),  # arXiv 2507.18071, section 5.1
    "cispo": Clip(1.0, 0.2),  # no lower bound: arXiv 2506.13585, section 3.1
}
_AGGREGATION = {"gspo": "sequence-mean"}  # arXiv 2507.18071, equation 5: all responses weigh alike
_TRACKER = "latest_checkpointed_iteration.txt"  # Megatron writes it into the folder of checkpoints
_BOUNDS = {"tis": (0.0, 2.0), "icepop": (0.5, 5.0), "mask": (0.5, 2.0)}


def read_loss(args: Any) -> LossOptions:
    """The loss that Megatron's validated arguments ask for.

    Raises:
        ValueError: an option is impossible, or the user's module cannot be imported; the message
            names the option.
    """
    if args.rollouts_loss_module is not None:
        _import_losses(args.rollouts_loss_module)
    name = value(args, "rollouts_loss")
    if name not in LOSSES:
        raise ValueError(f"--rollouts-loss {name}: it must be one of {', '.join(LOSSES)}")
    if args.rollouts_loss_module is not None and LOSSES[name].__module__ == policy_loss.__name__:
        others = [n for n, loss in LOSSES.items() if loss.__module__ != policy_loss.__name__]
        raise ValueError(
            f"--rollouts-loss-module {args.rollouts_loss_module} does nothing with --rollouts-loss "
            f"{name}, which megatron-r3 brings: choose one of the module's own "
            f"({', '.join(others) or 'it registers none'}), or leave the option out"
        )
    aggregation, fixed_length = _read_aggregation(args, name)
    correction = _read_correction(args)
    _refuse_other_divisor(args, aggregation, correction)
    return LossOptions(
        name=name,
        clip=_read_clip(args, name),
        aggregation=aggregation,
        fixed_length=fixed_length,
        correction=correction,
        penalty=PenaltyOptions(
            kl=args.rollouts_kl_coeff,
            kl_estimator=value(args, "rollouts_kl"),
            kl_place=value(args, "rollouts_kl_in"),
            entropy=args.rollouts_entropy_coeff,
        ),
    )


def _read_clip(args: Any, name: str) -> Clip:
    """The bounds of the ratio: those that were given, else the loss's own defaults."""
    usual = _CLIP.get(name, Clip())
    low = usual.low if args.rollouts_clip_eps is None else args.rollouts_clip_eps
    high = usual.high if args.rollouts_clip_eps is None else args.rollouts_clip_eps
    if args.rollouts_clip_eps_high is not None:
        high = args.rollouts_clip_eps_high
    if not 0 < low <= 1:
        raise ValueError(
            f"--rollouts-clip-eps {low:g}: it must be above 0 and at most 1 (1: no lower bound)"
        )
    if not 0 < high < math.inf:
        raise ValueError(f"--rollouts-clip-eps-high {high:g}: it must be a finite number above 0")
    dual = args.rollouts_dual_clip
    if dual is not None and not 1 < dual < math.inf:
        raise ValueError(f"--rollouts-dual-clip {dual:g}: it must be a finite number above 1")
    return Clip(low, high, dual)


def read_use(args: Any) -> UseOfRollouts:
    """The UseOfRollouts that Megatron's arguments ask for; `refuse_update` has checked them."""
    mini_steps, epochs = value(args, "rollouts_mini_steps"), value(args, "rollouts_epochs")
    return UseOfRollouts(
        args.seq_length,
        Schedule(args.global_batch_size, mini_steps, epochs, args.rollouts_shuffle),
        advantages=value(args, "rollouts_advantages"),
        source=value(args, "moe_router_replay_source") if args.moe_router_replay else "live",
        stale_source=value(args, "moe_router_replay_stale_source"),
        replay_max_lag=args.moe_router_replay_max_lag,
    )


def refuse_update(args: Any) -> None:
    """Refuse a seed, log file, reference or coefficient that could not do what its option says.

    Raises:
        ValueError: the message names the options.
    """
    _refuse_shuffle(args)
    _refuse_log(args.rollouts_log)
    _refuse_reference(args.rollouts_reference, args.save)
    for name in ("rollouts_kl_coeff", "rollouts_entropy_coeff"):
        if getattr(args, name) == math.inf:
            raise ValueError(f"{flag(name)} inf: it must be a finite number")


def _refuse_log(name: str | None) -> None:
    """Refuse a file for --rollouts-log that the first step could not write."""
    if name is None:
        return
    file = Path(name).resolve()
    if file.is_dir():
        raise ValueError(f"--rollouts-log {name}: it is a folder; name a file in it")
    if not file.parent.is_dir():
        raise ValueError(f"--rollouts-log {name}: its folder does not exist; make it first")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"--rollouts-log {name}: it cannot be written; name another file")


def _refuse_reference(name: str | None, saved: str | None) -> None:
    """Refuse a reference folder that has no policy, or that is the folder of --save."""
    if name is not None and saved is not None and Path(name).resolve() == Path(saved).resolve():
        raise ValueError(
            f"--rollouts-reference {name}: it is the folder of --save, and a resumed training "
            "would take the newest checkpoint in it as the reference: give a copy of the first "
            "checkpoint"
        )
    if name is not None and not any((Path(name) / n).is_file() for n in ("config.json", _TRACKER)):
        raise ValueError(
            f"--rollouts-reference {name}: it has neither a config.json of transformers nor a "
            f"{_TRACKER} of Megatron: give a transformers directory, or a folder of checkpoints"
        )


def reference_name(folder: str | None) -> str:
    """The folder of a reference policy, and the iteration of its checkpoint, as text.

    A resume compares this text: "/models/base", or "/run/checkpoints (iteration 200)".
    """
    if folder is None:
        return ""
    tracker = Path(folder) / _TRACKER
    iteration = f" (iteration {tracker.read_text().strip()})" if tracker.is_file() else ""
    return f"{Path(folder).resolve()}{iteration}"


def _refuse_shuffle(args: Any) -> None:
    """Refuse --rollouts-shuffle where the order inside a step would change the loss."""
    seed = args.rollouts_shuffle
    if seed is None:
        return
    option = f"--rollouts-shuffle {seed}"
    if not args.calculate_per_token_loss and (args.micro_batch_size > 1 or args.rollouts_pack):
        several = (
            "the rollouts of a pack" if args.rollouts_pack else f"{args.micro_batch_size} rollouts"
        )
        raise ValueError(
            f"{option} needs --calculate-per-token-loss, or one rollout in a micro-batch: here "
            f"{several} are averaged together, so another order would change the tokens' weights"
        )
    for kind, coefficient in _aux_coefficients(args):
        if coefficient and kind in ("aux_loss", "global_aux_loss"):
            raise ValueError(
                f"{option}: not together with --moe-router-load-balancing-type {kind} and "
                "--moe-aux-loss-coeff: that loss depends on which rollouts are in one micro-batch; "
                "leave one of the three out"
            )


def _read_aggregation(args: Any, loss: str) -> tuple[str, int]:
    """The name of the aggregation, and the number of tokens by which fixed-length divides."""
    usual = _AGGREGATION.get(loss, "token-mean")
    name, length = value(args, "rollouts_aggregation") or usual, args.rollouts_fixed_length
    if name == "fixed-length" and length is None and args.rollouts_pack:
        raise ValueError(
            "--rollouts-aggregation fixed-length with --rollouts-pack needs "
            "--rollouts-fixed-length: --seq-length is the length of a pack, not of a rollout"
        )
    return name, args.seq_length if length is None else length


def _refuse_other_divisor(args: Any, aggregation: str, correction: CorrectionOptions) -> None:
    """Refuse Megatron's other losses if the policy loss is not divided by its response tokens."""
    others = _other_losses(args) if args.calculate_per_token_loss else []
    if not others:
        return
    if aggregation != "token-mean":
        option, divisor = f"--rollouts-aggregation {aggregation}", "the number of rollouts"
    elif correction.name == "mask":
        option, divisor = "--rollouts-correction mask", "the number of tokens left"
    else:
        return
    raise ValueError(
        f"{option}: not together with --calculate-per-token-loss and {others[0]}: Megatron would "
        f"divide that loss, too, by {divisor} instead of the number of response tokens; leave one "
        "of the three out"
    )


def _other_losses(args: Any) -> list[str]:
    """The losses that Megatron adds to the policy loss, as the options that turn them on.

    With --calculate-per-token-loss Megatron multiplies these losses (auxiliary losses and z-loss of
    routers, the loss of MTP layers) by the number of tokens, because it later divides all gradients
    by the sum of the divisors that the loss function returned.
    """
    aux = [coefficient for kind, coefficient in _aux_coefficients(args) if "aux_loss" in kind]
    mtp = getattr(args, "mtp_loss_scaling_factor", None)
    is_on = {
        "moe_aux_loss_coeff": any(aux),
        "moe_z_loss_coeff": getattr(args, "moe_z_loss_coeff", None),
        "mtp_loss_scaling_factor": getattr(args, "mtp_num_layers", None) and mtp,
    }
    return [flag(name) for name, on in is_on.items() if on]


def _aux_coefficients(args: Any) -> list[tuple[str, float]]:
    """The kinds of load balancing that are asked for, each with its coefficient.

    Each of the two options is one value or a list. Megatron refuses lists of different lengths
    later.
    """
    kinds = getattr(args, "moe_router_load_balancing_type", None) or []
    coefficients = getattr(args, "moe_aux_loss_coeff", None) or 0.0
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(coefficients, list):
        coefficients = [coefficients] * len(kinds)
    return list(zip(kinds, coefficients, strict=False))


def _read_correction(args: Any) -> CorrectionOptions:
    name, given = value(args, "rollouts_correction"), args.rollouts_correction_bounds
    if name == "none":
        return CorrectionOptions()
    bounds = _BOUNDS[name]
    if given is not None:
        bounds = (0.0, *given) if name == "tis" else tuple(given)  # tis has no lower bound
    option = f"--rollouts-correction-bounds {' '.join(f'{bound:g}' for bound in given or ())}"
    if len(bounds) != 2:
        what = "one number, the upper bound" if name == "tis" else "a lower and an upper bound"
        raise ValueError(f"{option}: {name} takes {what}")
    low, high = bounds
    if not 0 <= low < high < math.inf:
        raise ValueError(f"{option}: bounds must be finite, and 0 <= lower < upper")
    return CorrectionOptions(name, value(args, "rollouts_correction_level"), low, high)


def _import_losses(module: str) -> None:
    """Import the user's module, which registers its losses in LOSSES."""
    if os.getcwd() not in sys.path:
        # `python -m` puts the working directory into sys.path, a script does not
        sys.path.insert(0, os.getcwd())
    try:
        importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything
        first_line = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"--rollouts-loss-module {module}: cannot be imported: {type(error).__name__}: "
            f"{first_line}"
        ) from error
