"""The probe: fixed tokens on which a sampler and the trainer must agree after each push of weights.

When the trainer publishes a policy, it computes the log-probs and the routes of some token
sequences. When the sampler reports the policy, the collector asks the sampler for the log-probs and
routes of these sequences. The difference must be about as small as in earlier pushes
(push_floor.py).

The tokens are random, so that they also reach experts that the task's own tokens seldom take.

Shape suffixes (docs/glossary.md): L, N, M, K.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np

NUM_SEQUENCES, LENGTH = 8, 64


def probe_tokens(vocab_size: int, most: int) -> np.ndarray:
    """The probe's tokens, int64 `[M, N]`, which depend on `vocab_size` and `most` alone.

    Args:
        vocab_size: without padding.
        most: how many tokens a sequence may have at most.
    """
    # The last id is left out: in the log-probs of a prompt SGLang 0.5.23 replaces that id by 0.
    last = max(1, vocab_size - 1)
    shape = (NUM_SEQUENCES, min(LENGTH, most))
    return np.random.default_rng(vocab_size).integers(0, last, shape)


@dataclass(frozen=True)
class Probe:
    """Log-probs and routes of fixed tokens under one policy, M sequences of N tokens.

    Attributes:
        tokens_MN: int64.
        logprobs_MN: float32, of each token given the tokens before it; 0 for a first token.
        routes_LMNK: uint16, the experts that each MoE layer takes for each token. A dense model
            has L = 0; no sampler of a run has such a model.
    """

    tokens_MN: np.ndarray
    logprobs_MN: np.ndarray
    routes_LMNK: np.ndarray

    def to_json(self) -> dict[str, Any]:
        """The probe's fields in policy.json."""
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
            ValueError, KeyError, TypeError, OverflowError: the fields are not those of a probe.
        """
        tokens_MN = np.array(fields["tokens"], np.int64)
        logprobs_MN = np.array(fields["logprobs"], np.float32)
        raw = base64.b64decode(fields["routes"]["uint16"], validate=True)
        routes_LMNK = np.frombuffer(raw, "<u2").reshape(fields["routes"]["shape"])
        if tokens_MN.ndim != 2 or logprobs_MN.shape != tokens_MN.shape:
            raise ValueError(f"tokens {tokens_MN.shape} and log-probs {logprobs_MN.shape}")
        if not np.isfinite(logprobs_MN).all():
            raise ValueError("a log-prob that is not finite")
        if routes_LMNK.shape[1:3] != tokens_MN.shape:
            raise ValueError(f"routes {routes_LMNK.shape} of tokens {tokens_MN.shape}")
        return cls(tokens_MN, logprobs_MN, routes_LMNK)


@dataclass(frozen=True)
class Difference:
    """How far a sampler's probe is from the trainer's.

    Attributes:
        abs_dlogp: the mean of |log-prob difference| over the tokens, without the first token of
            each sequence and without the tokens that `left_out` counts.
        abs_dlogp_all: the same mean, with the tokens that `left_out` counts.
        agreement: for each MoE layer the share of tokens with the same set of experts.
        cached_dlogp: the largest |log-prob difference| of the token that follows a sequence,
            between a request that computes all anew and a request that may use the prefix cache.
            Near 0 if the engine has no prefix cache. See `Pusher._compare`.
        cached_disagreement: the share of routes that differ between these two requests.
        left_out: the share of tokens that `abs_dlogp` leaves out, because they follow a token with
            other experts. None if so many tokens follow such a token that none is left out.
    """

    abs_dlogp: float
    abs_dlogp_all: float
    agreement: tuple[float, ...]
    cached_dlogp: float = 0.0
    cached_disagreement: float = 0.0
    left_out: float | None = 0.0

    @property
    def disagreement(self) -> float:
        """The share of tokens with other experts, as a mean over layers."""
        return 1 - float(np.mean(self.agreement))


# If `same_so_far` is true for less than this share of the log-probs, all of them are compared.
ENOUGH = 0.125


def difference(trainer: Probe, sampler: Probe) -> Difference:
    """Compare the sampler's probe with the trainer's.

    Two experts may have almost the same score, so that rounding decides between them. If sampler
    and trainer decide differently, all later tokens of the sequence get other log-probs, though all
    weights are right. In float32 this is rare, but one such token would dominate the mean, so the
    tokens after it are left out. Example: of tokens 0 to 63 token 40 has other experts, so tokens
    41 to 63 are left out.

    Raises:
        ValueError: the sampler answered for other tokens or layers.
    """
    if not np.array_equal(trainer.tokens_MN, sampler.tokens_MN):
        raise ValueError("the sampler's probe has other tokens than the trainer's")
    apart_MN = abs_dlogp(trainer, sampler)
    mean = float(apart_MN.mean())
    agreement = tuple(same_experts(trainer, sampler).mean((1, 2)).tolist())
    before_MN = same_so_far(trainer, sampler)
    if before_MN.mean() < ENOUGH:
        return Difference(mean, mean, agreement, left_out=None)
    left_out = 1 - float(before_MN.mean())
    return Difference(float(apart_MN[before_MN].mean()), mean, agreement, left_out=left_out)


def same_experts(one: Probe, other: Probe) -> np.ndarray:
    """Where two probes of the same tokens have the same set of experts, bool `[L, M, N]`.

    Raises:
        ValueError: the probes have different layers.
    """
    if one.routes_LMNK.shape != other.routes_LMNK.shape:
        raise ValueError(
            f"the sampler's probe has routes {other.routes_LMNK.shape}, the trainer's "
            f"{one.routes_LMNK.shape} (layers, sequences, tokens, top-k)"
        )
    same: np.ndarray = (np.sort(one.routes_LMNK, -1) == np.sort(other.routes_LMNK, -1)).all(-1)
    return same


def same_so_far(one: Probe, other: Probe) -> np.ndarray:
    """Which log-probs depend only on tokens that have the same experts in both probes.

    Returns:
        bool `[M, N - 1]`, without the first token of each sequence. Example: token 40 has other
        experts. Tokens 1 to 40 are true, since the log-prob of token 40 is computed from the tokens
        before it.
    """
    same_MN: np.ndarray = np.all(same_experts(one, other), axis=0)
    so_far_MN: np.ndarray = np.cumsum(~same_MN[:, :-1], 1) == 0
    return so_far_MN


def abs_dlogp(one: Probe, other: Probe) -> np.ndarray:
    """|log-prob difference| of all tokens but each sequence's first, float64 `[M, N - 1]`."""
    apart_MN: np.ndarray = np.abs(one.logprobs_MN.astype(np.float64) - other.logprobs_MN)
    return apart_MN[:, 1:]
