"""One sample out of the responses of one conversation.

A response answers a prompt that holds all that was said before. Asked with a start, it returns rows
from that token on only: an increment. The last token of a turn is forwarded in the next turn's
prefill, so its row arrives there: ask with a start of the previous length - 1, not the length.

Shape suffixes: N tokens, P prompt tokens, G sampled tokens, U turns, L MoE layers, T rows, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_r3.engines.sample import Sample
from megatron_r3.engines.shape import EngineError
from megatron_r3.routes import Routes
from megatron_r3.values import wrong_logprob, wrong_token

__all__ = ["Increment", "stitch"]


@dataclass(frozen=True)
class Increment:
    """What one response tells of a conversation.

    Attributes:
        tokens_N: int32, all tokens known by then: the response's prompt and what was sampled.
        prompt_length: P, how many of them are its prompt.
        logprobs_G: float32, of the tokens that this response sampled.
        routes: `[L, N - 1 - start, K]`, checked.
        start: the token of the first row.
        group: the samples of one prompt share it.
        where: what errors call the response.
    """

    tokens_N: np.ndarray
    prompt_length: int
    logprobs_G: np.ndarray
    routes: Routes
    start: int = 0
    group: int = 0
    where: str = "response"

    def check(self) -> None:
        """Refuse parts that do not belong together, and values that no rollout has.

        Raises:
            EngineError: naming `where`, and the token where there is one.
        """
        num_tokens = len(self.tokens_N)
        if not 0 <= self.start <= self.prompt_length:
            raise EngineError(
                f"{self.where}: routes start at token {self.start}; from 0 to the prompt's "
                f"{self.prompt_length} tokens"
            )
        if self.routes.num_rows != num_tokens - 1 - self.start:
            raise EngineError(
                f"{self.where}: {self.routes.num_rows} rows of routes for {num_tokens} tokens "
                f"from token {self.start} on; expected {num_tokens - 1 - self.start}"
            )
        if self.prompt_length < 1 or num_tokens - self.prompt_length != len(self.logprobs_G):
            raise EngineError(
                f"{self.where}: {len(self.logprobs_G)} log-probs for "
                f"{num_tokens - self.prompt_length} response tokens"
            )
        wrong = wrong_logprob(self.logprobs_G)
        if wrong is not None:
            token = self.prompt_length + wrong[0]
            raise EngineError(f"{self.where}: the log-prob of token {token} {wrong[1]}")
        wrong = wrong_token(self.tokens_N)
        if wrong is not None:
            raise EngineError(f"{self.where}: token {wrong[0]} {wrong[1]}")

    def whole(self) -> Sample:
        """This response alone as a sample.

        Raises:
            EngineError: its routes start late, or a row is missing.
        """
        if self.start:
            raise EngineError(
                f"{self.where}: routes start at token {self.start}: stitch the conversation's "
                "increments, or ask with start 0"
            )
        return stitch([self], self.where)


def stitch(increments: Sequence[Increment], where: str, *, holes: str = "refuse") -> Sample:
    """One sample of all turns, with the rows of all its tokens but the last.

    The longest response says the tokens; every other one must be a beginning of it, and a row that
    arrives again (a retry, a prefix sent twice) must be the same set of experts.

    Args:
        increments: of one conversation, in any order.
        where: what errors call the conversation.
        holes: of rows that no response brought: "refuse", or "missing" to leave them not recorded.

    Raises:
        EngineError: naming token and layer of what does not agree or is not there.
    """
    if holes not in ("refuse", "missing"):
        raise EngineError(f"{where}: holes are refuse or missing; got {holes!r}")
    if not increments:
        raise EngineError(f"{where}: there are no responses to stitch")
    ordered = sorted(increments, key=lambda one: len(one.tokens_N))  # stable: a retry comes second
    for one in ordered:
        one.check()
    tokens_N = ordered[-1].tokens_N
    for one in ordered[:-1]:
        _refuse_other_tokens(one, tokens_N, ordered[-1].where)
    routes = _joined_rows(ordered, len(tokens_N) - 1, where)
    if holes == "refuse" and not routes.recorded_T.all():
        token = int(np.argmin(routes.recorded_T))
        raise EngineError(
            f"{where}: no response brought the row of token {token} "
            f"({int((~routes.recorded_T).sum())} of {routes.num_rows} rows are missing); ask the "
            "next turn with a start of the previous length - 1"
        )
    turns, logprobs_G = _turns(ordered, len(tokens_N))
    sample = Sample(tokens_N, int(turns[0, 0]), logprobs_G, routes, ordered[0].group, turns)
    sample.check(where)
    return sample


def _refuse_other_tokens(one: Increment, tokens_N: np.ndarray, other: str) -> None:
    differs = one.tokens_N != tokens_N[: len(one.tokens_N)]
    if differs.any():
        token = int(np.argmax(differs))
        raise EngineError(
            f"{one.where}: token {token} is {one.tokens_N[token]}, and {tokens_N[token]} in "
            f"{other}: not one conversation, or its text was tokenized again"
        )


def _joined_rows(ordered: Sequence[Increment], num_rows: int, where: str) -> Routes:
    first = ordered[0].routes
    if len(ordered) == 1 and first.num_rows == num_rows:
        return first
    ids_LTK = np.zeros((first.num_layers, num_rows, first.topk), first.ids_LTK.dtype)
    recorded_T = np.zeros(num_rows, bool)
    for one in ordered:
        routes = one.routes
        if (routes.num_experts, routes.num_layers, routes.topk) != (
            first.num_experts,
            first.num_layers,
            first.topk,
        ):
            raise EngineError(f"{one.where}: layers, experts or top-k differ in one conversation")
        rows = slice(one.start, one.start + routes.num_rows)
        again_T = recorded_T[rows] & routes.recorded_T
        _refuse_other_rows(one, ids_LTK[:, rows], again_T)
        new_T = routes.recorded_T & ~again_T
        ids_LTK[:, rows][:, new_T] = routes.ids_LTK[:, new_T]
        recorded_T[rows] |= new_T
    return Routes.from_array(ids_LTK, first.num_experts, recorded_T, where)


def _refuse_other_rows(one: Increment, known_LTK: np.ndarray, again_T: np.ndarray) -> None:
    """The order inside a row carries no meaning, so it may differ."""
    if not again_T.any():
        return
    before, now = (np.sort(ids[:, again_T], -1) for ids in (known_LTK, one.routes.ids_LTK))
    differs_LT = (before != now).any(-1)
    if differs_LT.any():
        layer, row = (int(i) for i in np.argwhere(differs_LT)[0])
        token = one.start + int(np.flatnonzero(again_T)[row])
        raise EngineError(
            f"{one.where}: the row of token {token} arrived before and differs at MoE layer "
            f"{layer}: {before[layer, row].tolist()}, now {now[layer, row].tolist()} "
            f"({int(differs_LT.sum())} such rows)"
        )


def _turns(ordered: Sequence[Increment], num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Each run of tokens that one response sampled first, and the log-probs of them all."""
    turn_N = np.full(num_tokens, -1, np.int32)
    logprobs_N = np.zeros(num_tokens, np.float32)
    starts: list[int] = []
    for one in ordered:
        span = slice(one.prompt_length, len(one.tokens_N))
        new = turn_N[span] < 0
        if one.prompt_length not in starts:  # else the same turn again, perhaps longer
            starts.append(one.prompt_length)
        turn_N[span][new] = starts.index(one.prompt_length)
        logprobs_N[span][new] = one.logprobs_G[new]
    edges = np.flatnonzero(np.diff(turn_N, prepend=-1, append=-1))
    spans = np.stack([edges[:-1], edges[1:]], 1)
    turns = spans[turn_N[spans[:, 0]] >= 0].astype(np.int32)
    return turns, logprobs_N[turn_N >= 0]
