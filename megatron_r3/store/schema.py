"""What a rollout store holds: rollouts, and what is the same for all of them.

Shape suffixes: N tokens of a rollout, U turns, L MoE layers, T rows (N - 1), K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_r3.routes import Routes

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "Rollout",
    "SamplingSettings",
    "StoreError",
    "StoreInfo",
    "sampled_tokens",
    "turns_of",
]

FORMAT = "megatron-r3 rollouts"
FORMAT_VERSION = 2


class StoreError(ValueError):
    """A store that cannot be used; the message names the file and what to do."""


@dataclass(frozen=True)
class SamplingSettings:
    """How the engine drew tokens; None where nobody knows.

    Attributes:
        temperature: by which the logits were divided.
        top_p, top_k, min_p: what cut the distribution off; top_k 0: nothing.
        max_tokens: after which a response was ended.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None

    def unknown_to_the_loss(self) -> list[str]:
        """The settings that make the log-probs of the store other than those that were drawn from.

        The policy loss divides two probabilities at temperature 1 over the whole vocabulary.
        """
        plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        given = {name: getattr(self, name) for name in plain}
        return [
            f"{name} {value:g}"
            for name, value in given.items()
            if value is not None and value != plain[name]
        ]


@dataclass(frozen=True)
class StoreInfo:
    """What every rollout of a store shares; each shard carries it and all must agree.

    Attributes:
        num_experts: E of one MoE layer.
        topk: K.
        moe_layers: for each trace layer the 0-based hidden layer that it belongs to.
        engine, engine_version: what sampled.
        model: a name for people.
        router_fingerprint: one digest for each trace layer of the sampler's router weights
            (`megatron_r3.fingerprint`), or empty where the sampler could not tell.
        policy_stamp: a digest of all of the sampler's weights, or empty: it tells policies apart
            whose routers are the same.
        engine_policy: the version of its weights that the engine itself reports, or empty.
        vocab_size: rows of the sampler's output layer; 0 where nobody knows.
        sampling: how it drew tokens.
    """

    num_experts: int
    topk: int
    moe_layers: tuple[int, ...]
    engine: str
    engine_version: str
    model: str = ""
    router_fingerprint: tuple[str, ...] = ()
    policy_stamp: str = ""
    engine_policy: str = ""
    vocab_size: int = 0
    sampling: SamplingSettings = SamplingSettings()

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            StoreError: no layers, or not one digest for each.
        """
        if not self.moe_layers or not 1 <= self.topk <= self.num_experts:
            raise StoreError(f"{self}: a store has MoE layers, and topk of 1 to num_experts")
        if self.router_fingerprint and len(self.router_fingerprint) != len(self.moe_layers):
            raise StoreError(
                f"{len(self.router_fingerprint)} digests in router_fingerprint for "
                f"{len(self.moe_layers)} layers"
            )


@dataclass(frozen=True)
class Rollout:
    """One sampled sequence.

    Attributes:
        tokens_N: int32, prompt and response.
        response_N: bool, True on sampled tokens.
        logprobs_N: float32, the sampler's log-probability of each sampled token (0 elsewhere).
        reward: of the whole response.
        group: rollouts of one prompt share it (GRPO normalises inside it); it counts inside one
            directory and policy version.
        policy_version: which policy sampled.
        routes: `[L, N - 1, K]`: the last token was never forwarded.
        sample: its number inside the group: group, sample and policy version name a rollout.
        turns_U2: first token and end of each sampled span; None: the runs of `response_N`.
        prompt_digest: of what the engine was asked (63 bits); 0 where nobody knows. Rollouts of one
            group share it.
    """

    tokens_N: np.ndarray
    response_N: np.ndarray
    logprobs_N: np.ndarray
    reward: float
    group: int
    policy_version: int
    routes: Routes
    sample: int = 0
    turns_U2: np.ndarray | None = None
    prompt_digest: int = 0

    @cached_property
    def spans_U2(self) -> np.ndarray:
        """The turns, int32 `[U, 2]`."""
        turns = turns_of(self.response_N) if self.turns_U2 is None else self.turns_U2
        return np.asarray(turns, np.int32).reshape(-1, 2)

    def check(self, where: str) -> None:
        """Refuse shapes that do not belong together.

        Raises:
            StoreError: naming `where` and the field.
        """
        num_tokens = len(self.tokens_N)
        if num_tokens < 2:
            raise StoreError(f"{where}: {num_tokens} tokens; a rollout has at least 2")
        for name in ("response_N", "logprobs_N"):
            if len(getattr(self, name)) != num_tokens:
                raise StoreError(
                    f"{where}: {len(getattr(self, name))} {name} for {num_tokens} tokens"
                )
        ids = np.asarray(self.tokens_N)
        if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
            raise StoreError(f"{where}: token ids are 0 to 2**31 - 1")
        if self.response_N[0]:
            raise StoreError(f"{where}: its first token cannot be sampled: nothing predicts it")
        sampled_N = sampled_tokens(self.spans_U2, num_tokens)
        if sampled_N is None or not np.array_equal(sampled_N, self.response_N):
            raise StoreError(f"{where}: its turns are not the tokens that its response names")
        if not np.isfinite(self.logprobs_N).all() or not np.isfinite(self.reward):
            raise StoreError(f"{where}: log-probs and reward must be finite")
        if self.routes.num_rows != num_tokens - 1:
            raise StoreError(
                f"{where}: {self.routes.num_rows} rows of routes for {num_tokens} tokens; expected "
                f"{num_tokens - 1} (every token but the last is forwarded once)"
            )


def turns_of(response_N: np.ndarray) -> np.ndarray:
    """First token and end of each run of sampled tokens, int32 `[U, 2]`."""
    edges = np.diff(np.asarray(response_N, np.int8), prepend=0, append=0)
    return np.stack([np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)], 1).astype(np.int32)


def sampled_tokens(turns_U2: np.ndarray, num_tokens: int) -> np.ndarray | None:
    """The tokens that these turns name; None if they overlap or lie outside."""
    bounds = turns_U2.reshape(-1)
    ordered = (turns_U2[:, 0] < turns_U2[:, 1]).all() and (np.diff(bounds)[1::2] >= 0).all()
    if not ordered or (len(bounds) and (bounds[0] < 0 or bounds[-1] > num_tokens)):
        return None
    edges = np.zeros(num_tokens + 1, np.int64)
    np.add.at(edges, turns_U2[:, 0], 1)
    np.add.at(edges, turns_U2[:, 1], -1)
    return edges.cumsum()[:-1].astype(bool)
