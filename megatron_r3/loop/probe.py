"""The probe: fixed tokens on which a sampler and the trainer must agree after each push of weights.

The trainer computes the log-probs and the routes of some token sequences when it publishes a
policy. The collector asks the sampler for the same, once the sampler says that it has the policy.
What differs is compared with what differed when the sampler had loaded a policy from nothing.

The tokens are random, so that they reach all experts, also those that the task seldom takes.

Shape suffixes (docs/glossary.md): L, N, M, K.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NUM_SEQUENCES, LENGTH = 8, 64


def probe_tokens(vocab_size: int, most: int) -> np.ndarray:
    """The tokens, int64 `[M, N]`: the same for a vocabulary everywhere.

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
    """Log-probs and routes of fixed tokens under one policy, M sequences of N tokens.

    Attributes:
        tokens_MN: int64.
        logprobs_MN: float32, of each token after those before it; the first of a sequence is 0.
        routes_LMNK: the experts that each MoE layer takes for each token; empty `[0, M, N, 0]`
            where no router could be asked.
    """

    tokens_MN: np.ndarray
    logprobs_MN: np.ndarray
    routes_LMNK: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 0, 0), np.uint16))

    def to_json(self) -> dict[str, Any]:
        """What policy.json has of it."""
        return {
            "tokens": self.tokens_MN.tolist(),
            "logprobs": self.logprobs_MN.tolist(),
            "routes": {
                "shape": self.routes_LMNK.shape,
                "uint16": base64.b64encode(self.routes_LMNK.astype("<u2").tobytes()).decode(),
            },
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Probe:
        """The inverse of `to_json`.

        Raises:
            ValueError, KeyError, TypeError: what a file holds that no trainer wrote.
        """
        tokens_MN = np.array(fields["tokens"], np.int64)
        logprobs_MN = np.array(fields["logprobs"], np.float32)
        raw = base64.b64decode(fields["routes"]["uint16"], validate=True)
        routes_LMNK = np.frombuffer(raw, "<u2").reshape(fields["routes"]["shape"])
        if tokens_MN.ndim != 2 or logprobs_MN.shape != tokens_MN.shape:
            raise ValueError(f"tokens {tokens_MN.shape} and log-probs {logprobs_MN.shape}")
        if not np.isfinite(logprobs_MN).all():
            raise ValueError("a log-prob that is not finite")
        if routes_LMNK.size and routes_LMNK.shape[1:3] != tokens_MN.shape:
            raise ValueError(f"routes {routes_LMNK.shape} of tokens {tokens_MN.shape}")
        return cls(tokens_MN, logprobs_MN, routes_LMNK)


@dataclass(frozen=True)
class Difference:
    """How far a sampler's probe is from the trainer's.

    Attributes:
        abs_dlogp: the mean of |log-prob difference| over all tokens but the first ones, and but
            those that are left out.
        abs_dlogp_all: the same with those that are left out.
        agreement: for each MoE layer the share of tokens with the same set of experts; empty where
            no routes are known.
        cached_dlogp: the largest |log-prob difference| between the token that follows a sequence
            and the same token asked for once more, when the engine may use keys and values that it
            kept; 0 where the engine keeps none.
        cached_disagreement: the share of routes that differ between these two requests.
        left_out: the share of tokens that are left out of `abs_dlogp`: those that come after a
            token with other experts. None where these are too many, so that none is left out.
    """

    abs_dlogp: float
    abs_dlogp_all: float
    agreement: tuple[float, ...]
    cached_dlogp: float = 0.0
    cached_disagreement: float = 0.0
    left_out: float | None = 0.0

    @property
    def disagreement(self) -> float:
        """The mean share of tokens whose experts differ; 0 where no routes are known."""
        return 1 - float(np.mean(self.agreement)) if self.agreement else 0.0


# At least this share of the tokens is compared. Where fewer come before the first token of their
# sequence with other experts, all are compared.
ENOUGH = 0.125


def difference(trainer: Probe, sampler: Probe) -> Difference:
    """Compare the sampler's probe with the trainer's.

    Two experts of a router may have almost one score. Then the last digit decides between them, and
    with the other expert all later tokens of the sequence have other log-probs, though all weights
    are right. In float32 such a token is rare, and would be the whole difference. Example: rows 0
    to 63, and row 40 has other experts: the log-probs of the tokens 41 to 63 are left out.

    Raises:
        ValueError: the sampler answered for other tokens or layers.
    """
    if not np.array_equal(trainer.tokens_MN, sampler.tokens_MN):
        raise ValueError("the sampler's probe is of other tokens than the trainer's")
    apart_MN = abs_dlogp(trainer, sampler)
    mean = float(apart_MN.mean())
    if not trainer.routes_LMNK.size:
        return Difference(mean, mean, ())
    agreement = tuple(same_experts(trainer, sampler).mean((1, 2)).tolist())
    before_MN = same_so_far(trainer, sampler)
    if before_MN.mean() < ENOUGH:
        return Difference(mean, mean, agreement, left_out=None)
    left_out = 1 - float(before_MN.mean())
    return Difference(float(apart_MN[before_MN].mean()), mean, agreement, left_out=left_out)


def same_experts(one: Probe, other: Probe) -> np.ndarray:
    """Where two probes of the same tokens have the same set of experts, bool `[L, M, N]`.

    Raises:
        ValueError: they are of other layers.
    """
    if one.routes_LMNK.shape != other.routes_LMNK.shape:
        raise ValueError(
            f"the sampler's probe has routes {other.routes_LMNK.shape}, the trainer's "
            f"{one.routes_LMNK.shape} (layers, sequences, tokens, top-k)"
        )
    same: np.ndarray = (np.sort(one.routes_LMNK, -1) == np.sort(other.routes_LMNK, -1)).all(-1)
    return same


def same_so_far(one: Probe, other: Probe) -> np.ndarray:
    """Which tokens, but the first ones, come before any other expert of their sequence.

    Returns:
        bool `[M, N - 1]`. Example: token 40 has other experts; tokens 1 to 40 are true, since the
        log-prob of token 40 is computed from those before it. All are true where no routes are
        known.
    """
    if not (one.routes_LMNK.size and other.routes_LMNK.size):
        return np.ones_like(one.tokens_MN[:, 1:], bool)
    same_MN: np.ndarray = np.all(same_experts(one, other), axis=0)
    so_far_MN: np.ndarray = np.cumsum(~same_MN[:, :-1], 1) == 0
    return so_far_MN


def abs_dlogp(one: Probe, other: Probe) -> np.ndarray:
    """|log-prob difference| of all tokens but the first ones, float64 `[M, N - 1]`."""
    apart_MN: np.ndarray = np.abs(one.logprobs_MN.astype(np.float64) - other.logprobs_MN)
    return apart_MN[:, 1:]
