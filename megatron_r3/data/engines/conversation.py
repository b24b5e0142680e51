"""Joins the responses of one conversation into one rollout.

The prompt of each request holds the whole conversation before it. Example of two turns (u: a token
of the user, s: a sampled token); the second request asks for routes from token 4 on (its start):

    token         0 1 2 3 4 5 6 7 8
    response 1    u u s s s            rows of tokens 0 1 2 3
    response 2    u u s s s u u s s    rows of tokens 4 5 6 7

Token 4 was sampled by the first response and forwarded by the second: an engine makes the row of a
token when it forwards the token, and the request that samples the last token does not forward it.
So ask for the next turn's routes from the last token of this turn on: here from 4 on, not from 5.

Shape suffixes (docs/glossary.md): C, G, K, L, N, T, U.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from megatron_r3.data.engines.said import Said
from megatron_r3.data.engines.shape import EngineError, naming
from megatron_r3.data.kept import KeptSets
from megatron_r3.data.rollout import UNKNOWN_POLICY, UNREWARDED, Rollout
from megatron_r3.data.values import wrong_logprob
from megatron_r3.replay.routes import Routes

Choice = TypeVar("Choice")


@dataclass(frozen=True)
class Increment:
    """What one response adds to a conversation.

    Attributes:
        tokens_N: int32, the tokens of the prompt, then the sampled tokens of this response.
        prompt_length: how many of the tokens are the prompt.
        logprobs_G: float32, the log-prob of each sampled token of this response.
        routes: `[L, N - 1 - start, K]`, of the tokens from `start` on but the last.
        start: the token of the first row.
        group: the index of the prompt in its request.
        where: the name of the response in errors.
        kept: the kept set of each token, empty for tokens of the prompt; the log-probs are
            normalised over these sets. None if the engine returned no sampling mask.
        versions_G: int64, the version of the weights that sampled each token; None if the engine
            does not report it as a whole number.
        said: the response's text, finish reason, weight versions and model name.
    """

    tokens_N: np.ndarray
    prompt_length: int
    logprobs_G: np.ndarray
    routes: Routes
    start: int = 0
    group: int = 0
    where: str = "response"
    kept: KeptSets | None = None
    versions_G: np.ndarray | None = None
    said: Said = field(default_factory=Said)

    def check(self) -> None:
        """Refuse fields that do not fit each other, and values that no rollout can have.

        Raises:
            EngineError: naming the token of a wrong value, but not `where`.
        """
        num_tokens = len(self.tokens_N)
        if not 0 <= self.start <= self.prompt_length:
            raise EngineError(
                f"routes start at token {self.start}; expected a start from 0 to "
                f"{self.prompt_length}, the length of the prompt"
            )
        if self.routes.num_rows != num_tokens - 1 - self.start:
            raise EngineError(
                f"{self.routes.num_rows} rows of routes for {num_tokens} tokens; expected "
                f"{num_tokens - 1 - self.start}, from token {self.start} on"
            )
        if num_tokens - self.prompt_length != len(self.logprobs_G):
            raise EngineError(
                f"{len(self.logprobs_G)} log-probs for {num_tokens - self.prompt_length} response "
                "tokens"
            )
        if wrong := wrong_logprob(self.logprobs_G):
            raise EngineError(f"the log-prob of token {self.prompt_length + wrong[0]} {wrong[1]}")
        sampled_N = np.arange(num_tokens) >= self.prompt_length
        logprobs_N = np.zeros(num_tokens, np.float32)
        logprobs_N[sampled_N] = self.logprobs_G
        if self.kept and (reason := self.kept.wrong(self.tokens_N, sampled_N, logprobs_N)):
            raise EngineError(reason)

    def whole(self) -> Rollout:
        """The rollout of this response alone.

        Raises:
            EngineError: the routes do not start at token 0, or a field is refused by `check`.
        """
        if self.start:
            raise EngineError(
                f"{self.where}: routes start at token {self.start}: stitch the conversation's "
                "increments, or ask for routes from token 0 on"
            )
        return stitch([self], self.where)


def read_choices(
    choices: Sequence[Choice], where: str, count: int, read: Callable[[Choice, int], Increment]
) -> list[Increment]:
    """The increment of each choice of a response; an error names the choice.

    Args:
        choices: all choices of one response: first all choices of the first prompt, then all
            choices of the second prompt, and so on.
        where: the name of the request in errors.
        count: how many choices a prompt has.
        read: makes an increment from a choice and the index of the choice's prompt.

    Raises:
        EngineError: naming the request and the number of the choice.
    """
    increments = []
    for number, choice in enumerate(choices):
        name = f"{where}, choice {number}"
        with naming(name):
            group = number // count
            increment = replace(read(choice, group), where=name, group=group)
            increment.check()
        increments.append(increment)
    return increments


def stitch(increments: Sequence[Increment], where: str, *, holes: str = "refuse") -> Rollout:
    """One rollout of all turns, with a row for each token but the last.

    The longest response has all tokens of the conversation. Each other response must have the first
    of these tokens. A row that arrives again (a retry, a prefix sent twice) must be the same set of
    experts.

    Args:
        increments: the increments of one conversation, in any order.
        where: the name of the conversation in errors.
        holes: what happens if a row is in no response: "refuse" is an error, and "missing" makes it
            a missing row.

    Returns:
        A rollout with the reward `UNREWARDED`. The policy version is the oldest one if several
        versions sampled the rollout, and else `UNKNOWN_POLICY`.

    Raises:
        EngineError: there is no increment; the tokens, rows, kept sets or versions of two responses
            contradict each other; or a row is in no response, and `holes` is "refuse".
    """
    if holes not in ("refuse", "missing"):
        raise EngineError(f"{where}: holes must be refuse or missing; got {holes!r}")
    if not increments:
        raise EngineError(f"{where}: there are no responses to stitch")
    # a stable sort: responses of the same length keep their order, so a retry stays behind
    ordered = sorted(increments, key=lambda increment: len(increment.tokens_N))
    tokens_N = ordered[-1].tokens_N
    # `read_choices` has checked its increments, but a caller may make an increment by hand, or
    # change one between two turns. So each increment is checked again.
    for increment in ordered:
        with naming(increment.where):
            increment.check()
            _refuse_other_tokens(increment, tokens_N, ordered[-1].where)
    routes = _joined_rows(ordered, len(tokens_N) - 1)
    if holes == "refuse":
        _refuse_holes(routes, where)
    turns_U2, response_N, logprobs_N, source_N = _turns(ordered, len(tokens_N))
    versions_C2 = _joined_versions(ordered, source_N)
    rollout = Rollout(
        tokens_N=tokens_N,
        response_N=response_N,
        logprobs_N=logprobs_N,
        reward=UNREWARDED,
        group=ordered[0].group,
        policy_version=UNKNOWN_POLICY if versions_C2 is None else int(versions_C2[0, 1]),
        routes=routes,
        turns_U2=turns_U2,
        kept=_joined_kept(ordered, source_N),
        versions_C2=versions_C2,
    )
    if wrong := rollout.wrong_parts():
        raise EngineError(f"{where}: {wrong}")
    return rollout


def _refuse_holes(routes: Routes, where: str) -> None:
    if not routes.recorded_T.all():
        token = int(np.argmin(routes.recorded_T))  # False is less than True: the first False
        raise EngineError(
            f"{where}: no response brought the row of token {token} "
            f"({int((~routes.recorded_T).sum())} of {routes.num_rows} rows are missing); with "
            "each next turn ask for routes beginning at the last token of the previous turn"
        )


def _refuse_other_tokens(increment: Increment, tokens_N: np.ndarray, other: str) -> None:
    differs = increment.tokens_N != tokens_N[: len(increment.tokens_N)]
    if differs.any():
        token = int(np.argmax(differs))
        raise EngineError(
            f"token {token} is id {increment.tokens_N[token]}, but id {tokens_N[token]} in {other}:"
            " these are two conversations, or a text was tokenized again"
        )


def _joined_rows(ordered: Sequence[Increment], num_rows: int) -> Routes:
    """The rows of all increments; a row that no increment has is marked as not recorded."""
    first = ordered[0].routes
    if len(ordered) == 1 and first.num_rows == num_rows:  # the usual case: nothing is copied
        return first
    ids_LTK = np.zeros((first.num_layers, num_rows, first.topk), first.ids_LTK.dtype)
    recorded_T = np.zeros(num_rows, bool)
    for increment in ordered:
        routes = increment.routes
        with naming(increment.where):
            if (routes.num_experts, routes.num_layers, routes.topk) != (
                first.num_experts,
                first.num_layers,
                first.topk,
            ):
                raise EngineError(
                    f"layers, experts or top-k are other than in {ordered[0].where}, which is of "
                    "the same conversation"
                )
            rows = slice(increment.start, increment.start + routes.num_rows)
            # again_T marks the rows that an earlier increment and this increment bring
            again_T = recorded_T[rows] & routes.recorded_T
            _refuse_other_rows(increment, ids_LTK[:, rows], again_T)
        new_T = routes.recorded_T & ~again_T
        # ids_LTK[:, rows] is a view, so the assignment to its columns changes ids_LTK. Usually all
        # columns are new, and a slice is copied far faster than the columns of a mask.
        columns = slice(None) if new_T.all() else new_T
        ids_LTK[:, rows][:, columns] = routes.ids_LTK[:, columns]
        recorded_T[rows] |= new_T
    return Routes(ids_LTK, first.num_experts, recorded_T)  # rows of `Routes` are checked already


def _refuse_other_rows(increment: Increment, known_LTK: np.ndarray, again_T: np.ndarray) -> None:
    """Refuse a row that an earlier increment brought with another set of experts."""
    if not again_T.any():
        return
    # [3, 0] and [0, 3] are one set of experts: a retry may well return its rows in another order
    before, now = (np.sort(ids[:, again_T], -1) for ids in (known_LTK, increment.routes.ids_LTK))
    differs_LT = (before != now).any(-1)
    if differs_LT.any():
        layer, row = (int(i) for i in np.argwhere(differs_LT)[0])
        token = increment.start + int(np.flatnonzero(again_T)[row])
        raise EngineError(
            f"the row of token {token} arrived twice, with other experts at MoE layer {layer}: "
            f"first {before[layer, row].tolist()}, now {now[layer, row].tolist()} (rows that "
            f"differ: {int(differs_LT.any(0).sum())})"
        )


def _turns(
    ordered: Sequence[Increment], num_tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The turns, int32 `[U, 2]`; which tokens were sampled, bool `[N]`; their log-probs, `[N]`.

    The fourth array, `[N]`, has the place in `ordered` of the response that sampled each token, and
    -1 for tokens not sampled.

    A token belongs to the first response that sampled it. So a longer retry adds only the tokens
    that the first try does not have. A response that was cut off and then continued gives two
    adjacent turns. Example, N = 6:

        response 1, prompt of 2, samples tokens 2 3        turn of each token: - - 0 0
        response 2, prompt of 4, samples tokens 4 5                            - - 0 0 1 1

    The turns - - 0 0 1 1 change at 2, at 4 and at the end: so they are [2, 4] and [4, 6].
    """
    turn_N = np.full(num_tokens, -1, np.int32)
    source_N = np.full(num_tokens, -1, np.int64)
    logprobs_N = np.zeros(num_tokens, np.float32)
    prompt_lengths: list[int] = []  # one for each turn: a retry has a prompt of the same length
    for number, increment in enumerate(ordered):
        span = slice(increment.prompt_length, len(increment.tokens_N))
        new = turn_N[span] < 0
        if increment.prompt_length not in prompt_lengths:
            prompt_lengths.append(increment.prompt_length)
        turn_N[span][new] = prompt_lengths.index(increment.prompt_length)
        logprobs_N[span][new] = increment.logprobs_G[new]
        source_N[span][new] = number
    edges = np.flatnonzero(np.diff(turn_N, prepend=-1, append=-1))
    spans = np.stack([edges[:-1], edges[1:]], 1)
    turns_U2 = spans[turn_N[spans[:, 0]] >= 0].astype(np.int32)  # not the gaps between two turns
    return turns_U2, turn_N >= 0, logprobs_N, source_N


def _joined_kept(ordered: Sequence[Increment], source_N: np.ndarray) -> KeptSets | None:
    """Each token's kept set, from the response that sampled the token; None if there are none."""
    used = [ordered[number] for number in np.unique(source_N[source_N >= 0]).tolist()]
    without = [increment for increment in used if increment.kept is None]
    if len(without) == len(used):
        return None
    if without:
        raise EngineError(
            f"{without[0].where}: no sampling mask, while other responses of its conversation have "
            "one"
        )
    parts = [increment.kept or KeptSets.none(0) for increment in ordered]
    # where the sets of each token's response begin in the joined sets
    begin_N = np.cumsum([0, *(len(part.sizes_N) for part in parts)])[source_N]
    places_N = np.where(source_N >= 0, begin_N + np.arange(len(source_N)), -1)
    return KeptSets.joined(parts).take(places_N)


def _joined_versions(ordered: Sequence[Increment], source_N: np.ndarray) -> np.ndarray | None:
    """First token and version of each version span, int64 `[C, 2]`.

    None if one version sampled all tokens, or if the version of a token is unknown.
    """
    sampled = np.flatnonzero(source_N >= 0)
    versions = []
    for token in sampled.tolist():
        increment = ordered[source_N[token]]
        if increment.versions_G is None:
            return None
        versions.append(int(increment.versions_G[token - increment.prompt_length]))
    changes = np.flatnonzero(np.diff(versions, prepend=-1))
    if len(changes) < 2:
        return None
    return np.stack([sampled[changes], np.array(versions)[changes]], 1).astype(np.int64)
