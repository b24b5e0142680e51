"""The policy losses as their papers write them: rollout by rollout, in float64, without autograd.

There is no mask, no padding and no batch here: a rollout is the list of its response tokens. Every
derivative is worked out by hand. No code is shared with `megatron_r3.train.losses`: only attributes
of its `LossOptions`, the name of a loss and its numbers, are read here.

Shape suffixes (docs/glossary.md): G.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Response:
    """The response tokens of one rollout; G may be 0.

    Attributes:
        trainer, old, sampler: log-probs, float64 `[G]`, of the policy pi that is trained, of the
            policy from which the update starts, and of the sampler mu.
        advantage: A.
        reference: log-probs `[G]` of the reference policy of a KL term.
    """

    trainer: np.ndarray
    old: np.ndarray
    sampler: np.ndarray
    advantage: float
    reference: np.ndarray | None = None


@dataclass(frozen=True)
class Expected:
    """What a policy loss of some rollouts must be.

    Attributes:
        sum: the loss of all rollouts, before it is divided by `divisor`.
        divisor: the number of tokens (token-mean) or of rollouts.
        gradients: those of `sum` with respect to the trainer's log-probs, `[G]` for each rollout.
        positive: the sum of the absolute values of all tokens' parts in `sum`. Tests divide the
            error of `sum` by `positive`.
        shares: the factor of each token's part in `sum`, `[G]` for each rollout; 0 for a token that
            does not count.
    """

    sum: float
    divisor: int
    gradients: list[np.ndarray]
    positive: float
    shares: list[np.ndarray]

    @property
    def loss(self) -> float:
        """`sum` divided by `divisor`; 0 where no token counts."""
        return self.sum / max(self.divisor, 1)


def expected(responses: Sequence[Response], options: Any) -> Expected:
    """Compute the loss that `options` (`megatron_r3.train.losses.loss.LossOptions`) describes."""
    total, positive, divisor, gradients, shares = 0.0, 0.0, 0, [], []
    for response in responses:
        kl_G, kl_slope_G = kl_of(response, response.trainer, options.penalty, "loss")
        lowered_G, _ = kl_of(response, response.old, options.penalty, "advantage")
        advantages_G = response.advantage - lowered_G
        gain_G, slope_G = _GAINS[options.name](response, advantages_G, options.clip)
        weight_G, keep_G = _correction(response, options.correction)
        kept = int(keep_G.sum())
        scale = {
            "token-mean": 1.0,  # DAPO, arXiv 2503.14476, equation 8
            "sequence-mean": 1.0 / max(kept, 1),  # GRPO, arXiv 2402.03300, equation 3
            "fixed-length": 1.0 / (options.fixed_length or 1),  # Dr.GRPO, arXiv 2503.20783
        }[options.aggregation]
        divisor += kept if options.aggregation == "token-mean" else int(kept > 0)
        share_G = scale * keep_G
        parts_G = share_G * (kl_G - weight_G * gain_G)
        total += float(parts_G.sum())
        positive += float(np.abs(parts_G).sum())
        gradients.append(share_G * (kl_slope_G - weight_G * slope_G))
        shares.append(share_G)
    return Expected(total, divisor, gradients, positive, shares)


def kl_of(
    response: Response, logprobs_G: np.ndarray, penalty: Any, place: str
) -> tuple[np.ndarray, np.ndarray]:
    """The KL term of each token, and the derivative of the term by the policy's log-prob.

    With d = log(ref / policy): k1 is -d, k2 is d^2 / 2, k3 is exp(d) - 1 - d (J. Schulman,
    "Approximating KL divergence", 2020). The derivative of d by the policy's log-prob is -1.

    Args:
        logprobs_G: the log-probs of the policy.
        place: "loss" or "advantage". Both results are 0 if the options have no KL term there.
    """
    if penalty.kl is None or penalty.kl_place != place:
        return np.zeros(len(logprobs_G)), np.zeros(len(logprobs_G))
    assert response.reference is not None
    pairs = []
    for d in response.reference - logprobs_G:
        pairs.append(
            {
                "k1": (-d, 1.0),
                "k2": (d * d / 2, -d),
                "k3": (math.exp(d) - 1 - d, 1 - math.exp(d)),
            }[penalty.kl_estimator]
        )
    values_G, slopes_G = _columns(pairs)
    return penalty.kl * values_G, penalty.kl * slopes_G


def _grpo(response: Response, advantages_G: np.ndarray, clip: Any) -> tuple[np.ndarray, np.ndarray]:
    """Gain and slope of each token, with a ratio for each token."""
    ratio_G = np.exp(response.trainer - response.old)
    return _columns([_clipped(r, a, clip) for r, a in zip(ratio_G, advantages_G, strict=True)])


def _gspo(response: Response, advantages_G: np.ndarray, clip: Any) -> tuple[np.ndarray, np.ndarray]:
    """GSPO-token, arXiv 2507.18071, equations 13 and 14: all tokens have the sequence's ratio."""
    if not len(response.trainer):
        return np.zeros(0), np.zeros(0)
    ratio = math.exp(float(np.mean(response.trainer - response.old)))
    return _columns([_clipped(ratio, advantage, clip) for advantage in advantages_G])


def _clipped(ratio: float, advantage: float, clip: Any) -> tuple[float, float]:
    """PPO's gain, and its derivative with respect to the log of the ratio, case by case.

    PPO: arXiv 1707.06347, equation 7. Dual clip: arXiv 1912.09729, equation 5.
    """
    gain = ratio * advantage
    if advantage > 0 and ratio > 1 + clip.high:
        return (1 + clip.high) * advantage, 0.0
    if advantage < 0 and ratio < 1 - clip.low:
        return (1 - clip.low) * advantage, 0.0
    if advantage < 0 and clip.dual is not None and ratio > clip.dual:
        return clip.dual * advantage, 0.0
    return gain, gain


def _cispo(
    response: Response, advantages_G: np.ndarray, clip: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The slope is a clipped weight, held constant, times A: arXiv 2506.13585, equations 4 and 5.

    The gain has the same value, without the paper's factor log pi, to compare with other gains.
    """
    bounds = 1 - clip.low, 1 + clip.high
    ratios = [math.exp(x) for x in response.trainer - response.old]
    weights = [min(max(ratio, bounds[0]), bounds[1]) for ratio in ratios]
    gains = [weight * advantage for weight, advantage in zip(weights, advantages_G, strict=True)]
    return np.array(gains), np.array(gains)


def advantages(rewards: Sequence[float], groups: Sequence[int], normalised: bool) -> list[float]:
    """Each reward minus its group's mean; if `normalised`, divided by the standard deviation.

    GRPO, arXiv 2402.03300, section 4.1.2; not normalised: Dr.GRPO, arXiv 2503.20783.
    """
    found = []
    for reward, group in zip(rewards, groups, strict=True):
        inside = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean = sum(inside) / len(inside)
        variance = sum((r - mean) ** 2 for r in inside) / len(inside)
        found.append((reward - mean) / ((math.sqrt(variance) + 1e-6) if normalised else 1.0))
    return found


_GAINS = {"grpo": _grpo, "gspo": _gspo, "cispo": _cispo}


def _correction(response: Response, options: Any) -> tuple[np.ndarray, np.ndarray]:
    """The correction weight of each token, and whether the token counts."""
    log_w_G = response.old - response.sampler
    w_G = np.exp(log_w_G)
    if options.level == "sequence":
        w_G = np.full(len(w_G), math.exp(math.fsum(log_w_G)))
    one_G, all_G = np.ones(len(w_G)), np.ones(len(w_G), bool)
    inside_G = (options.low <= w_G) & (w_G <= options.high)
    if options.name == "tis":
        return np.minimum(w_G, options.high), all_G
    if options.name == "icepop":
        return np.where(inside_G, w_G, 0.0), all_G
    if options.name == "mask":
        return one_G, inside_G
    assert options.name == "none"
    return one_G, all_G


def _columns(pairs: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    values_G2 = np.array(pairs, np.float64).reshape(-1, 2)
    return values_G2[:, 0], values_G2[:, 1]
