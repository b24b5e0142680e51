"""Policy losses by name: each is a function from the terms of a micro-batch to the gain of tokens.

To add a loss, write its function in a module of your own, and name the module with
`--rollouts-loss-module`:

    from megatron_r3.train.losses.policy_loss import Gain, Clip, policy_loss_named
    from megatron_r3.train.losses.terms import LossTerms

    @policy_loss_named("reinforce")
    def reinforce(terms: LossTerms, clip: Clip) -> Gain:
        return Gain(terms.advantages_BS * terms.logprobs_BS, terms.log_ratio_BS.exp())

Clip fractions are logged only for a loss that says what its clip range bounds (`Gain.clips`).

Shape suffixes (docs/glossary.md): B, S.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_r3.train.losses.terms import LossTerms


@dataclass(frozen=True)
class Clip:
    """The bounds of the policy ratio, 1 - low and 1 + high, and the constant of dual clip.

    Attributes:
        low, high: above 0. A low of 1 is no bound, because a ratio is positive.
        dual: above 1: a token with a negative advantage A loses at most dual * |A|. None: no dual
            clip.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None


@dataclass(frozen=True)
class Gain:
    """What a loss gives for each token.

    Attributes:
        value_BS: what the update raises, with gradient; not used outside the mask.
        ratio_BS: the ratio that the loss compares with the clip range; for the metrics.
        clips: what the clip range bounds; for the metrics. "gain": min() chooses between the gain
            by the ratio and the gain by the clipped ratio, as in PPO. "weight": the ratio itself is
            clipped. None: the clip range bounds nothing, or the loss does not say what.
    """

    value_BS: Tensor
    ratio_BS: Tensor
    clips: Literal["gain", "weight"] | None = None


PolicyLoss = Callable[[LossTerms, Clip], Gain]
LOSSES: dict[str, PolicyLoss] = {}


def policy_loss_named(name: str) -> Callable[[PolicyLoss], PolicyLoss]:
    """Put a loss into the table that `--rollouts-loss` chooses from.

    Raises:
        ValueError: another loss has this name.
    """

    def add(loss: PolicyLoss) -> PolicyLoss:
        if LOSSES.setdefault(name, loss) is not loss:
            raise ValueError(f"two policy losses are named {name!r}: give yours another name")
        return loss

    return add


class LossError(ValueError):
    """A loss that cannot be trained with; the message names the loss, its module and the fault."""


_looked_at: set[str] = set()  # the losses that were used, and so checked, once


def gain_of(name: str, terms: LossTerms, clip: Clip) -> Gain:
    """The gain of a loss; the gain is checked when the loss is first used.

    Raises:
        LossError: the loss raises, or returns what cannot be trained with.
    """
    loss = LOSSES[name]
    where = f"--rollouts-loss {name} of the module {loss.__module__}"
    try:
        gain = loss(terms, clip)
    except Exception as error:  # a user's loss may raise anything
        if loss.__module__ == __name__:
            raise  # one of ours: the traceback is needed
        # Frame 0 is `gain_of`. Frame 1 is the loss, which the error names.
        frames = traceback.extract_tb(error.__traceback__)[1:2]
        line = "".join(f" in {frame.filename}, line {frame.lineno}" for frame in frames)
        raise LossError(f"{where}: {type(error).__name__}{line}: {error}") from error
    if name not in _looked_at:
        if wrong := _wrong_gain(gain, terms):
            raise LossError(f"{where}: it must return a Gain of megatron_r3: {wrong}")
        _looked_at.add(name)
    return gain


def _wrong_gain(gain: object, terms: LossTerms) -> str:
    """What is wrong with the gain of a loss; empty if nothing is. Nothing waits for the device."""
    if not isinstance(gain, Gain):
        return f"it returned {type(gain).__name__}"
    shape = terms.logprobs_BS.shape
    for field in ("value_BS", "ratio_BS"):
        value = getattr(gain, field)
        if not isinstance(value, Tensor):
            return f"its {field} is {type(value).__name__}, not a tensor"
        if value.shape != shape:
            return (
                f"its {field} has the shape {[*value.shape]}, not {[*shape]}, the shape of "
                "terms.logprobs_BS: one value for each token"
            )
    if terms.logprobs_BS.requires_grad and not gain.value_BS.requires_grad:
        return (
            "its value_BS has no gradient, so nothing would be learned: compute it from "
            "terms.logprobs_BS, without detach()"
        )
    return ""


@policy_loss_named("grpo")
def grpo(terms: LossTerms, clip: Clip) -> Gain:
    """min(r A, clip(r, 1 - low, 1 + high) A) with r = pi / old of each token.

    A token has this term in equation 3 of GRPO (arXiv 2402.03300), beside the KL term, and in PPO's
    objective (arXiv 1707.06347, equation 7). With `high` above `low` it is "clip-higher" of DAPO
    (arXiv 2503.14476, section 3.1). Dual clip is from arXiv 1912.09729, equation 5.
    """
    ratio_BS = terms.log_ratio_BS.exp()
    return Gain(_clipped(ratio_BS, terms.advantages_BS, clip), ratio_BS, "gain")


@policy_loss_named("gspo")
def gspo(terms: LossTerms, clip: Clip) -> Gain:
    """min(s A, clip(s, 1 - low, 1 + high) A) with s = exp(mean of log r over the response).

    GSPO, arXiv 2507.18071, equations 5 to 7. The ratio s belongs to the whole response. The code
    has a ratio for each token, as GSPO-token of section 4.3, because a response may lie on several
    ranks: each token's ratio has the value of s, and a gradient by the token's own log-prob alone.

    Example: a response of 2 tokens with log r = (0.1, 0.3) has s = exp(0.2). The ratio of each
    token has the value s. The mean of the two ratios has the value s too, and its gradient by each
    log-prob is s / 2, which is also the gradient of s.
    """
    own_BS = terms.logprobs_BS - terms.logprobs_BS.detach()  # 0, with the gradient of the log-prob
    mean_BS = terms.sequence_mean(terms.log_ratio_BS)
    ratio_BS = (mean_BS + torch.where(terms.mask_BS > 0, own_BS, 0.0)).exp()
    return Gain(_clipped(ratio_BS, terms.advantages_BS, clip), ratio_BS, "gain")


@policy_loss_named("cispo")
def cispo(terms: LossTerms, clip: Clip) -> Gain:
    """sg(clip(r, 1 - low, 1 + high)) A log pi, where sg stops the gradient.

    CISPO of MiniMax-M1, arXiv 2506.13585, equations 4 and 5. A clipped token keeps its gradient.
    The paper bounds the weight from above alone (section 3.1). A low of 1, the default of
    --rollouts-clip-eps for cispo, does the same here, because no ratio is below 0. The value of the
    gain is the clipped ratio times A, so that it can be compared with the gains of other losses;
    log pi is only in the gradient.
    """
    ratio_BS = terms.log_ratio_BS.exp()
    weight_BS = ratio_BS.detach().clamp(1.0 - clip.low, 1.0 + clip.high)
    own_BS = terms.logprobs_BS - terms.logprobs_BS.detach()
    one_BS = 1.0 + torch.where(terms.mask_BS > 0, own_BS, 0.0)
    return Gain(weight_BS * terms.advantages_BS * one_BS, ratio_BS, "weight")


def _clipped(ratio_BS: Tensor, advantages_BS: Tensor, clip: Clip) -> Tensor:
    """min(r A, clip(r) A), and with dual clip at least c A where A < 0."""
    within_BS = ratio_BS.clamp(1.0 - clip.low, 1.0 + clip.high)
    gain_BS = torch.minimum(ratio_BS * advantages_BS, within_BS * advantages_BS)
    if clip.dual is None:
        return gain_BS
    floor_BS = torch.where(advantages_BS < 0, clip.dual * advantages_BS, -torch.inf)
    return torch.maximum(gain_BS, floor_BS)


def clipped_sums(gain: Gain, terms: LossTerms, clip: Clip) -> dict[str, Tensor]:
    """Count the response tokens that the clip range bounds; scalars, no gradient.

    A ratio is too low below 1 - low, and too high above 1 + high. If a loss clips the ratio itself
    (`clips` is "weight"), every token with a ratio that is too low or too high counts. If a loss
    clips the gain, a ratio that is too low counts only with a negative advantage, and a ratio that
    is too high only with a positive advantage: in these two cases min() takes the clipped product,
    and the gain has no gradient.

    Returns:
        `clip_low` and `clip_high`: how many tokens count because their ratio is too low or too
        high. `clippable`: how many response tokens there are. Empty if `clips` is None.
    """
    if gain.clips is None:
        return {}
    with torch.no_grad():
        ratio_BS, advantages_BS, on_BS = gain.ratio_BS, terms.advantages_BS, terms.mask_BS > 0
        low_BS = on_BS & (ratio_BS < 1.0 - clip.low)
        high_BS = on_BS & (ratio_BS > 1.0 + clip.high)
        if gain.clips == "gain":
            low_BS, high_BS = low_BS & (advantages_BS < 0), high_BS & (advantages_BS > 0)
        counts = {"clip_low": low_BS, "clip_high": high_BS, "clippable": on_BS}
        return {name: which_BS.sum().float() for name, which_BS in counts.items()}
