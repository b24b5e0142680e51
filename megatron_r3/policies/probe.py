"""The probe: fixed tokens on which a sampler and the trainer must agree after each push of weights.

The trainer computes the log-probs and the routes of some token sequences when it publishes a
policy. The collector asks the sampler for the same, once the sampler says that it has the policy.
What differs is compared with what differed when the sampler had loaded a policy from nothing.

The tokens are random, so that they reach all experts, also those that the task seldom takes.

Shape suffixes (docs/glossary.md): L, N, P, K.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NUM_SEQUENCES, LENGTH = 8, 64


def probe_tokens(vocab_size: int, most: int) -> np.ndarray:
    """The tokens, int64 `[P, N]`: the same for a vocabulary everywhere.

    Args:
        vocab_size: without padding.
        most: tokens that a sequence may have at most.
    """
    # SGLang 0.5.23 takes the last id of a vocabulary for 0 where it gives a prompt's log-probs.
    last = max(1, vocab_size - 1)
    shape = (NUM_SEQUENCES, min(LENGTH, most))
    return np.random.default_rng(vocab_size).integers(0, last, shape)


@dataclass(frozen=True)
class Probe:
    """Log-probs and routes of fixed tokens under one policy, P sequences of N tokens.

    Attributes:
        tokens_PN: int64.
        logprobs_PN: float32, of each token after those before it; the first of a sequence is 0.
        routes_LPNK: the experts that each MoE layer takes for each token; empty `[0, P, N, 0]`
            where no router could be asked.
    """

    tokens_PN: np.ndarray
    logprobs_PN: np.ndarray
    routes_LPNK: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 0, 0), np.uint16))

    def to_json(self) -> dict[str, Any]:
        """What policy.json has of it."""
        return {
            "tokens": self.tokens_PN.tolist(),
            "logprobs": self.logprobs_PN.tolist(),
            "routes": {
                "shape": self.routes_LPNK.shape,
                "uint16": base64.b64encode(self.routes_LPNK.astype("<u2").tobytes()).decode(),
            },
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Probe:
        """The inverse of `to_json`.

        Raises:
            ValueError, KeyError, TypeError: what a file holds that no trainer wrote.
        """
        tokens_PN = np.array(fields["tokens"], np.int64)
        logprobs_PN = np.array(fields["logprobs"], np.float32)
        raw = base64.b64decode(fields["routes"]["uint16"], validate=True)
        routes_LPNK = np.frombuffer(raw, "<u2").reshape(fields["routes"]["shape"])
        if tokens_PN.ndim != 2 or logprobs_PN.shape != tokens_PN.shape:
            raise ValueError(f"tokens {tokens_PN.shape} and log-probs {logprobs_PN.shape}")
        if not np.isfinite(logprobs_PN).all():
            raise ValueError("a log-prob that is not finite")
        if routes_LPNK.size and routes_LPNK.shape[1:3] != tokens_PN.shape:
            raise ValueError(f"routes {routes_LPNK.shape} of tokens {tokens_PN.shape}")
        return cls(tokens_PN, logprobs_PN, routes_LPNK)


@dataclass(frozen=True)
class Difference:
    """How far a sampler's probe is from the trainer's.

    Attributes:
        abs_dlogp: the mean of |log-prob difference| over all tokens but the first ones.
        agreement: for each MoE layer the share of tokens with the same set of experts; empty where
            no routes are known.
        cached_dlogp: the largest |log-prob difference| between the token that follows a sequence
            and the same token asked for once more, when the engine may use keys and values that it
            kept; 0 where the engine keeps none.
    """

    abs_dlogp: float
    agreement: tuple[float, ...]
    cached_dlogp: float = 0.0

    @property
    def disagreement(self) -> float:
        """The mean share of tokens whose experts differ; 0 where no routes are known."""
        return 1 - float(np.mean(self.agreement)) if self.agreement else 0.0


def difference(trainer: Probe, sampler: Probe, cached_dlogp: float = 0.0) -> Difference:
    """Compare the sampler's probe with the trainer's.

    Raises:
        ValueError: the sampler answered for other tokens or layers.
    """
    if not np.array_equal(trainer.tokens_PN, sampler.tokens_PN):
        raise ValueError("the sampler's probe is of other tokens than the trainer's")
    apart_PN = np.abs(sampler.logprobs_PN.astype(np.float64) - trainer.logprobs_PN)[:, 1:]
    agreement: tuple[float, ...] = ()
    if trainer.routes_LPNK.size:
        if sampler.routes_LPNK.shape != trainer.routes_LPNK.shape:
            raise ValueError(
                f"the sampler's probe has routes {sampler.routes_LPNK.shape}, the trainer's "
                f"{trainer.routes_LPNK.shape}"
            )
        same = np.sort(sampler.routes_LPNK, -1) == np.sort(trainer.routes_LPNK, -1)
        agreement = tuple(same.all(-1).mean((1, 2)).tolist())
    return Difference(float(apart_PN.mean()), agreement, cached_dlogp)


# A sampler that begins with a policy is compared with these, since nothing of it is known yet.
# Measured: an engine in bfloat16 is up to 0.08 from a float32 model of random weights (0.3 with
# MLA), and at least 0.8 of its routes are the same; wrong rotary kernels leave 0.03 to 0.12.
MOST_DLOGP, MOST_DISAGREEMENT = 0.3, 0.4
# How far above the usual difference one push may be.
FACTOR, ROOM_DLOGP, ROOM_DISAGREEMENT = 3.0, 2e-6, 0.005


@dataclass
class Floor:
    """What usually differs between a sampler and the trainer, from the pushes so far.

    Attributes:
        before: the differences of the last pushes that were accepted, newest last.
    """

    before: list[Difference] = field(default_factory=list)

    @property
    def limits(self) -> tuple[float, float]:
        """The largest |dlogp| and share of other routes that the next push may show."""
        if not self.before:
            return MOST_DLOGP, MOST_DISAGREEMENT
        dlogp = float(np.median([one.abs_dlogp for one in self.before]))
        routes = float(np.median([one.disagreement for one in self.before]))
        return FACTOR * dlogp + ROOM_DLOGP, FACTOR * routes + ROOM_DISAGREEMENT

    def judge(self, push: Difference) -> list[str]:
        """What is wrong with a push, in words with both numbers; empty if it is accepted."""
        dlogp, routes = self.limits
        usual = (
            "no push was compared before" if not self.before else "three times what pushes showed"
        )
        wrong = []
        if not push.abs_dlogp <= dlogp:  # NaN is wrong too
            wrong.append(f"mean |dlogp| {push.abs_dlogp:.3g}, at most {dlogp:.3g} ({usual})")
        if not push.disagreement <= routes:
            layers = ", ".join(f"{share:.3f}" for share in push.agreement)
            wrong.append(
                f"{push.disagreement:.3g} of the routes differ, at most {routes:.3g} ({usual}); "
                f"the same by MoE layer: {layers}"
            )
        if not push.cached_dlogp <= dlogp:
            wrong.append(
                f"with kept keys and values |dlogp| {push.cached_dlogp:.3g}, at most {dlogp:.3g}: "
                "the engine's prefix cache is of older weights"
            )
        return wrong

    def accept(self, push: Difference) -> None:
        """Remember a push that was right."""
        self.before = [*self.before, push][-8:]
