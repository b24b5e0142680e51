"""The record of one sampled sequence.

A `Rollout` is the only record between an engine and the trainer. `engines/` makes it out of one or
more responses. Whoever asked the engine adds the reward and the name (policy version, group and
sample). `store/` writes the record and reads it back.

Shape suffixes (docs/glossary.md): C, N, U.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_r3.data.kept import KeptSets
from megatron_r3.data.values import wrong_logprob, wrong_name, wrong_reward, wrong_token
from megatron_r3.replay.routes import Routes
from megatron_r3.replay.words import must_be, quoted

# A decoder that does not know the reward or the policy version sets these values. A store refuses
# NaN and -1, so a rollout without reward or version is never trained on by mistake.
UNREWARDED = float("nan")
UNKNOWN_POLICY = -1


@dataclass(frozen=True)
class Rollout:
    """One sampled sequence.

    Attributes:
        tokens_N: int32, prompt and response.
        response_N: bool, True on sampled tokens.
        logprobs_N: float32, the sampler's log-probability of each sampled token, 0 on all others.
        reward: the reward of the whole response; a decoder sets `UNREWARDED` (NaN).
        group: a number that the rollouts of one prompt share: GRPO normalises rewards inside a
            group. The number is unique inside one directory and policy version; a decoder sets the
            index of the prompt in its request.
        policy_version: which policy sampled, the oldest one if several did. A decoder that reads no
            `versions_C2` sets `UNKNOWN_POLICY` (-1).
        routes: `[layers, N - 1, topk]`; the last token has no row, because the engine never
            forwarded it.
        sample: the number of the rollout inside its group. Group, sample and policy version
            together name a rollout.
        turns_U2: first token and end of each turn; None if each run of sampled tokens is one turn.
            Two turns may touch (a response that was continued): then only this field tells the two
            turns apart.
        prompt_digest: 63 bits of a hash of what the engine was asked, which the rollouts of one
            group share; 0 if it is not known.
        kept: the kept sets; the log-probs are normalised over these sets. None if nothing was cut
            off, or if the sets were not recorded.
        versions_C2: int64, the first token and the policy version of each span that one policy
            sampled, if the weights changed while the rollout was sampled. The first span begins at
            the first sampled token, each other span at a sampled token. Versions ascend, and
            `policy_version` is the first one. None if one policy sampled all tokens.
        advantage: the advantage of the whole response, given together with the reward; None if the
            trainer has to compute it from the rewards.
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
    kept: KeptSets | None = None
    versions_C2: np.ndarray | None = None
    advantage: float | None = None

    @cached_property
    def spans_U2(self) -> np.ndarray:
        """First token and end of each turn, int32 `[U, 2]`, also if `turns_U2` is None."""
        turns = turns_of(self.response_N) if self.turns_U2 is None else self.turns_U2
        return np.asarray(turns, np.int32).reshape(-1, 2)

    @property
    def prompt_length(self) -> int:
        """How many tokens come before the first sampled one; all of them if none was sampled."""
        return int(self.spans_U2[0, 0]) if len(self.spans_U2) else len(self.tokens_N)

    def check(self, where: str, vocab_size: int = 0) -> None:
        """Refuse impossible values, and a rollout without policy version or reward.

        Args:
            where: what the error calls the rollout.
            vocab_size: how many token ids the sampler has; 0 if that is not known.

        Raises:
            ValueError: naming `where` and the wrong field or token.
        """
        wrong = self._wrong_name() or self.wrong_parts(vocab_size)
        if wrong is None and (reason := wrong_reward(self.reward)):
            wrong = f"reward {quoted(self.reward)}: {reason}"
        if wrong is None and self.advantage is not None and wrong_reward(self.advantage):
            wrong = must_be("advantage", "a finite number, in float32", self.advantage)
        if wrong is not None:
            raise ValueError(f"{where}: {wrong}")

    def wrong_parts(self, vocab_size: int = 0) -> str | None:
        """Which field is impossible, and why; None if all fields are possible.

        Name, reward and advantage are not checked: a response is checked before these are known.

        Args:
            vocab_size: how many token ids the sampler has; 0 if that is not known.
        """
        num_tokens = len(self.tokens_N)
        if num_tokens < 2:
            return f"{num_tokens} tokens; a rollout has at least 2"
        for name in ("tokens_N", "response_N", "logprobs_N"):
            shape = np.shape(getattr(self, name))
            if shape != (num_tokens,):
                return f"{name} of shape {shape} for {num_tokens} tokens"
        if self.routes.num_rows != num_tokens - 1:
            return (
                f"{self.routes.num_rows} rows of routes for {num_tokens} tokens; expected "
                f"{num_tokens - 1} (every token but the last is forwarded once)"
            )
        if not np.issubdtype(np.asarray(self.tokens_N).dtype, np.integer):
            return f"tokens_N must be whole numbers; got {np.asarray(self.tokens_N).dtype}"
        return wrong_values(
            np.asarray(self.tokens_N),
            np.asarray(self.response_N, bool),
            np.asarray(self.logprobs_N),
            self.spans_U2,
            self.policy_version,
            self.versions_C2,
            self.kept,
            vocab_size,
        )

    def _wrong_name(self) -> str | None:
        for name in ("policy_version", "group", "sample", "prompt_digest"):
            try:
                operator.index(getattr(self, name))  # takes numpy's whole numbers too
            except TypeError:
                return must_be(name, "a whole number", getattr(self, name))
        if wrong := wrong_name(self.policy_version, self.group, self.sample):
            return wrong
        if not 0 <= self.prompt_digest < 2**63:
            return must_be("prompt_digest", "of 63 bits", self.prompt_digest)
        return None


def wrong_values(
    tokens_N: np.ndarray,
    sampled_N: np.ndarray,
    logprobs_N: np.ndarray,
    spans_U2: np.ndarray,
    policy_version: int,
    versions_C2: np.ndarray | None,
    kept: KeptSets | None,
    vocab_size: int,
) -> str | None:
    """Why no rollout can have these values; None if a rollout can.

    The arguments are fields of `Rollout`, and their shapes fit each other; `sampled_N` is
    `response_N`.
    """
    if wrong := wrong_token(tokens_N, vocab_size):
        return f"token {wrong[0]} {wrong[1]}"
    if sampled_N[0]:
        return "its first token cannot be sampled: nothing predicts it"
    covered_N = sampled_tokens(spans_U2, len(tokens_N))
    if covered_N is None or not np.array_equal(covered_N, sampled_N):
        return "its `turns` and its `response` mark different tokens as sampled"
    if wrong := wrong_logprobs(logprobs_N, sampled_N):
        return f"token {wrong[0]}: {wrong[1]}"
    if versions_C2 is not None and (
        reason := wrong_versions(versions_C2, sampled_N, policy_version)
    ):
        return reason
    return None if kept is None else kept.wrong(tokens_N, sampled_N, logprobs_N, vocab_size)


def wrong_versions(
    versions_C2: np.ndarray, sampled_N: np.ndarray, policy_version: int
) -> str | None:
    """Why no rollout can have these version spans (`Rollout.versions_C2`); None if one can."""
    spans = np.asarray(versions_C2)
    if spans.dtype != np.int64 or spans.ndim != 2 or spans.shape[1] != 2 or not len(spans):
        return "its version spans must be int64 pairs of first token and version"
    first_C, version_C = spans.T
    for token in first_C.tolist():
        if not 0 <= token < len(sampled_N) or not sampled_N[token]:
            return f"a version span begins at token {token}, which was not sampled"
    if first_C[0] != np.argmax(sampled_N):
        return f"its version spans begin at token {first_C[0]}, not at the first sampled one"
    for name, values_C in (("first tokens", first_C), ("versions", version_C)):
        if (np.diff(values_C) <= 0).any():
            return f"the {name} of its version spans must ascend; got {values_C[:20].tolist()}"
    if version_C[0] != policy_version:
        return (
            f"policy_version is {policy_version}; it must be {version_C[0]}, the version of the "
            "first and oldest version span"
        )
    return None


def versions_of(
    versions_C2: np.ndarray | None, sampled_N: np.ndarray, policy_version: int
) -> np.ndarray:
    """The policy version that sampled each token, int64 `[N]`; -1 for tokens not sampled."""
    if versions_C2 is None:
        return np.where(sampled_N, policy_version, -1)
    # How many spans have begun at each token. Example: with spans that begin at the tokens 3 and 5,
    # the tokens 0 to 6 have 0 0 0 1 1 2 2.
    begun_N = np.searchsorted(versions_C2[:, 0], np.arange(len(sampled_N)), side="right")
    return np.where(sampled_N, versions_C2[np.maximum(begun_N - 1, 0), 1], -1)


def wrong_logprobs(logprobs_N: np.ndarray, response_N: np.ndarray) -> tuple[int, str] | None:
    """The first impossible log-prob: the index of its token, and what is wrong; else None.

    Args:
        logprobs_N: float, one for each token.
        response_N: bool; the log-probs of tokens that were not sampled must be 0.
    """
    sampled = np.flatnonzero(response_N)
    if wrong := wrong_logprob(logprobs_N[sampled]):
        return int(sampled[wrong[0]]), f"its log-prob {wrong[1]}"
    for token in np.flatnonzero((logprobs_N != 0) & ~response_N)[:1]:
        value = logprobs_N[token]
        return int(token), f"its log-prob is {value:g}; it must be 0, as the token was not sampled"
    return None


def turns_of(response_N: np.ndarray) -> np.ndarray:
    """First token and end of each run of sampled tokens, int32 `[U, 2]`."""
    # [F F T T F T] has the steps [0 0 +1 0 -1 +1] and, with a 0 behind the last token, a -1 at 6:
    # runs begin at +1 and end at -1, so they are [2, 4] and [5, 6].
    steps = np.diff(np.asarray(response_N, np.int8), prepend=0, append=0)
    return np.stack([np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)], 1).astype(np.int32)


def sampled_tokens(turns_U2: np.ndarray, num_tokens: int) -> np.ndarray | None:
    """Which tokens these turns cover, bool `[N]`.

    None if the turns are out of order or overlap, or if a turn is empty or outside of the tokens.
    """
    # [[2, 4], [5, 6]] is 2 4 5 6; the step from an end (4) to the next first token (5) may be 0
    bounds = turns_U2.reshape(-1)
    ordered = (turns_U2[:, 0] < turns_U2[:, 1]).all() and (np.diff(bounds)[1::2] >= 0).all()
    if not ordered or (len(bounds) and (bounds[0] < 0 or bounds[-1] > num_tokens)):
        return None
    # the inverse of turns_of; add.at, because an end and the next start may be the same index
    steps = np.zeros(num_tokens + 1, np.int64)
    np.add.at(steps, turns_U2[:, 0], 1)
    np.add.at(steps, turns_U2[:, 1], -1)
    return steps.cumsum()[:-1].astype(bool)
