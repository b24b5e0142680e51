"""What a rollout store holds: rollouts, and what is the same for all of them.

Shape suffixes: N tokens of a rollout, U turns, L MoE layers, T rows (N - 1), K top-k.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from megatron_r3.routes import Routes
from megatron_r3.untrusted import one_line
from megatron_r3.values import (
    wrong_logprob,
    wrong_name,
    wrong_reward,
    wrong_text,
    wrong_token,
)

FORMAT = "megatron-r3 rollouts"
FORMAT_VERSION = 3

_MOST_EXPERTS = 32768  # routes.py: on a device ids are int16
_DIGEST = re.compile("[0-9a-f]{16}")


class StoreError(ValueError):
    """A store that cannot be used; the message names the file and what to do."""


@dataclass(frozen=True)
class SamplingSettings:
    """How the engine drew tokens; a setting that nobody knows is None.

    Attributes:
        temperature: what the logits were divided by.
        top_p, top_k, min_p: what the distribution was cut off by; top_k 0 cuts nothing off.
        max_tokens: the length at which a response was ended.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None

    def check(self, where: str) -> None:
        """Refuse settings that no engine has.

        Raises:
            StoreError: naming `where` and the setting.
        """
        for name, most in (("temperature", 1e4), ("top_p", 1.0), ("min_p", 1.0)):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 <= value <= most):
                raise _wrong(f"{where}: sampling.{name}", f"a number from 0 to {most:g}", value)
        for name, least in (("top_k", 0), ("max_tokens", 1)):
            value = getattr(self, name)
            if value is not None:
                _check_whole(f"{where}: sampling.{name}", value, least, 2**31 - 1)

    def unknown_to_the_loss(self) -> list[str]:
        """The settings under which tokens were not drawn from the distribution of the log-probs.

        The policy loss divides two probabilities at temperature 1 over the whole vocabulary, and
        the store has log-probs of that distribution. Example: `["temperature 0.7", "top_k 20"]`.
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

    @property
    def policy(self) -> tuple[tuple[str, ...], str, str]:
        """What tells one policy from another: router digests, stamp, the engine's own version."""
        return self.router_fingerprint, self.policy_stamp, self.engine_policy

    def check(self, where: str = "StoreInfo") -> None:
        """Refuse what cannot be.

        Raises:
            StoreError: naming `where` and the field.
        """
        _check_whole(f"{where}: num_experts", self.num_experts, 1, _MOST_EXPERTS)
        _check_whole(f"{where}: topk", self.topk, 1, self.num_experts)
        layers = self.moe_layers
        whole = isinstance(layers, tuple) and all(type(n) is int for n in layers)
        if not (whole and layers and layers[0] >= 0 and layers[-1] < 2**31) or any(
            one >= other for one, other in pairwise(layers)
        ):
            raise _wrong(
                f"{where}: moe_layers", "the numbers of hidden layers, from 0 on, ascending", layers
            )
        for name in ("engine", "engine_version", "model", "policy_stamp", "engine_policy"):
            if wrong := wrong_text(getattr(self, name)):
                raise StoreError(f"{where}: {name} must be {wrong}")
        self._check_digests(f"{where}: router_fingerprint")
        _check_whole(f"{where}: vocab_size", self.vocab_size, 0, 2**31)
        if not isinstance(self.sampling, SamplingSettings):
            raise _wrong(f"{where}: sampling", "SamplingSettings", self.sampling)
        self.sampling.check(where)

    def _check_digests(self, where: str) -> None:
        digests = self.router_fingerprint
        if not isinstance(digests, tuple) or not all(
            isinstance(digest, str) and _DIGEST.fullmatch(digest) for digest in digests
        ):
            raise _wrong(where, "16 hex digits for each MoE layer, or empty", digests)
        if digests and len(digests) != len(self.moe_layers):
            raise StoreError(f"{where}: {len(digests)} digests for {len(self.moe_layers)} layers")


def differences(there: StoreInfo, here: StoreInfo) -> list[str]:
    """What two stores do not have in common, a few words for each field that differs.

    Example: `["topk 4 there, 2 here", "router of layer 3 0f.. there, 1b.. here (and 46 more)"]`.
    """
    different = []
    for field in fields(StoreInfo):
        a, b = getattr(there, field.name), getattr(here, field.name)
        if a == b:
            continue
        if field.name == "sampling":
            settings = [(f.name, getattr(a, f.name), getattr(b, f.name)) for f in fields(a)]
            different += [
                f"{name} {_short(x)} there, {_short(y)} here" for name, x, y in settings if x != y
            ]
        elif field.name == "router_fingerprint" and len(a) == len(b) == len(there.moe_layers):
            layers = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
            first = layers[0]
            more = f" (and {len(layers) - 1} more)" if len(layers) > 1 else ""
            number = there.moe_layers[first]
            different.append(f"router of layer {number} {a[first]} there, {b[first]} here{more}")
        elif field.name == "router_fingerprint":
            different.append(f"{len(a)} router digests there, {len(b)} here")
        else:
            different.append(f"{field.name} {_short(a)} there, {_short(b)} here")
    return different


def _short(value: Any) -> str:
    return one_line(repr(list(value) if isinstance(value, tuple) else value), 80)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _check_whole(name: str, value: Any, least: int, most: int) -> None:
    """Refuse what is no whole number of this range; True and 4.0 are none."""
    if type(value) is not int or not least <= value <= most:
        raise _wrong(name, f"a whole number from {least} to {most}", value)


def _wrong(name: str, expected: str, got: Any) -> StoreError:
    return StoreError(f"{name} must be {expected}; got {_short(got)}")


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

    def check(self, where: str, vocab_size: int = 0) -> None:
        """Refuse shapes that do not belong together, and values that no rollout has.

        Args:
            vocab_size: of the sampler; 0 where it is not known.

        Raises:
            StoreError: naming `where` and the field, and the token where there is one.
        """
        num_tokens = len(self.tokens_N)
        if num_tokens < 2:
            raise StoreError(f"{where}: {num_tokens} tokens; a rollout has at least 2")
        for name in ("tokens_N", "response_N", "logprobs_N"):
            shape = np.shape(getattr(self, name))
            if shape != (num_tokens,):
                raise StoreError(f"{where}: {name} of shape {shape} for {num_tokens} tokens")
        self._check_name(where)
        if wrong := wrong_reward(self.reward):
            raise StoreError(f"{where}: reward {_short(self.reward)}: {wrong}")
        self._check_tokens(where, vocab_size)
        if self.routes.num_rows != num_tokens - 1:
            raise StoreError(
                f"{where}: {self.routes.num_rows} rows of routes for {num_tokens} tokens; expected "
                f"{num_tokens - 1} (every token but the last is forwarded once)"
            )

    def _check_name(self, where: str) -> None:
        for name in ("policy_version", "group", "sample", "prompt_digest"):
            try:
                operator.index(getattr(self, name))
            except TypeError as error:
                raise _wrong(f"{where}: {name}", "a whole number", getattr(self, name)) from error
        if wrong := wrong_name(self.policy_version, self.group, self.sample):
            raise StoreError(f"{where}: {wrong}")
        if not 0 <= self.prompt_digest < 2**63:
            raise _wrong(f"{where}: prompt_digest", "of 63 bits", self.prompt_digest)

    def _check_tokens(self, where: str, vocab_size: int) -> None:
        tokens_N = np.asarray(self.tokens_N)
        if not np.issubdtype(tokens_N.dtype, np.integer):
            raise StoreError(f"{where}: tokens_N are whole numbers; got {tokens_N.dtype}")
        if wrong := wrong_token(tokens_N, vocab_size or None):
            raise StoreError(f"{where}: token {wrong[0]} {wrong[1]}")
        if self.response_N[0]:
            raise StoreError(f"{where}: its first token cannot be sampled: nothing predicts it")
        sampled_N = sampled_tokens(self.spans_U2, len(tokens_N))
        if sampled_N is None or not np.array_equal(sampled_N, self.response_N):
            raise StoreError(f"{where}: its turns are not the tokens that its response names")
        if wrong := wrong_logprobs(np.asarray(self.logprobs_N), sampled_N):
            raise StoreError(f"{where}: token {wrong[0]}: {wrong[1]}")


def wrong_logprobs(logprobs_N: np.ndarray, response_N: np.ndarray) -> tuple[int, str] | None:
    """The first log-prob that cannot be: its token, and what is wrong with it.

    Args:
        response_N: bool; the log-probs of other tokens are 0.
    """
    sampled = np.flatnonzero(response_N)
    if wrong := wrong_logprob(logprobs_N[sampled]):
        return int(sampled[wrong[0]]), f"its log-prob {wrong[1]}"
    for token in np.flatnonzero((logprobs_N != 0) & ~response_N)[:1]:
        return int(token), f"its log-prob is {logprobs_N[token]:g}; it was not sampled, so 0"
    return None


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
