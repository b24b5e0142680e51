"""The turns of a collection of Megatron's RL loop: their tokens, their routes, and their rows.

Every rank reads all turns, in the order before the loop shares them out among data-parallel ranks.
The rows of a collection are those of the first turn, then those of the second, and so on. A turn of
N tokens has N - 1 rows: the engine never forwards the last token, and no log-prob depends on the
experts of the last token, so that token counts as padding. Example: the row ids of the positions
that two turns of 4 and 3 tokens take.

    not packed, padded to 5 positions   0 1 2 -1 -1  and  3 4 -1 -1 -1
    packed, a bin of both turns         0 1 2 -1 3 4 -1

Shape suffixes (docs/glossary.md): B, C, G, K, L, M, N, S, T, U.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_r3.data.engines.megatron import routes_array
from megatron_r3.data.rollout import Rollout, turns_of
from megatron_r3.replay.routes import MoEShape, Routes, id_dtype
from megatron_r3.replay.rows import PADDING
from megatron_r3.replay.words import quoted


@dataclass(frozen=True)
class Turn:
    """A sequence that the loop trains on: a turn of a rollout with all tokens before the turn.

    Megatron's main branch trains on a rollout of several turns as one sequence, if the tokens of
    each turn begin with all tokens of the turn before. Then the sequence has a request to the
    engine for each turn, which sampled only the tokens of that turn.

    Attributes:
        name: the sequence's name in errors.
        tokens_N: int32 token ids.
        response_N: bool, True on sampled tokens.
        logprobs: the sampler's log-prob of each sampled token.
        sent: for each request, the shortest first, the number of its tokens, and the routes as the
            engine sent them (None if it sent none).
        reward: the rollout's reward.
        group, sample: the number of the rollout's group, and of the sequence in that group.
        versions: pairs of a token and a policy version, ascending: from the forward pass of that
            token on, the policy of that version sampled. The first pair's token is 0.
    """

    name: str
    tokens_N: np.ndarray
    response_N: np.ndarray
    logprobs: Sequence[float]
    sent: Sequence[tuple[int, Any]]
    reward: Any
    group: int
    sample: int
    versions: Sequence[Sequence[int]]

    @property
    def lacks_routes(self) -> bool:
        """Whether the engine sent no routes for at least one request of the sequence."""
        return any(routes is None for _, routes in self.sent)

    def routes(self, shape: MoEShape) -> Routes:
        """The routes `[L, N - 1, K]`, checked; rows that the engine did not send are not recorded.

        A row comes from the first request that forwarded its token. Example, requests of 4 and 7
        tokens: rows 0 to 2 are of the first request, which forwarded 3 tokens, and rows 3 to 5 of
        the second. If the engine sent no routes for the first request, rows 0 to 2 are missing.

        Raises:
            ValueError: routes of other layers, experts or tokens, naming the turn.
        """
        num_layers = len(shape.moe_layers)
        ids_TLK = np.zeros((len(self.tokens_N) - 1, num_layers, shape.topk), np.int64)
        recorded_T = np.zeros(len(ids_TLK), bool)
        first = 0
        for length, sent in self.sent:
            if sent is not None:
                ids_TLK[first : length - 1] = self._rows(sent, length, shape)[first:]
                recorded_T[first : length - 1] = True
            first = length - 1
        ids_LTK = ids_TLK.swapaxes(0, 1)
        return Routes.from_array(ids_LTK, shape.num_experts, recorded_T, self.name)

    def _rows(self, sent: Any, length: int, shape: MoEShape) -> np.ndarray:
        ids_TLK = routes_array(sent, f"{self.name}: its routes")
        expected = (length - 1, len(shape.moe_layers), shape.topk)
        if ids_TLK.shape != expected:
            raise ValueError(
                f"{self.name}: routes of (tokens, layers, top-k) {ids_TLK.shape}; expected "
                f"{expected}, a row for each of {length} tokens but the last: the engine runs "
                "another model, or an agent changed the tokens"
            )
        return ids_TLK

    def record(self, shape: MoEShape) -> Rollout:
        """The turn as a rollout of a store.

        Raises:
            ValueError: for the reasons of `routes`; or there is not one log-prob for each sampled
                token; or the reward is no number.
        """
        logprobs_N = np.zeros(len(self.tokens_N), np.float32)
        if len(self.logprobs) != self.response_N.sum():
            raise ValueError(
                f"{self.name}: {len(self.logprobs)} log-probs for {self.response_N.sum()} sampled "
                "tokens; its agent must return one for each token of the generation mask"
            )
        logprobs_N[self.response_N] = self.logprobs
        if not isinstance(self.reward, (int, float)):
            raise ValueError(f"{self.name}: reward {quoted(self.reward)}: a store needs one number")
        sampled_G = np.flatnonzero(self.response_N)
        version_G = self.version_N[sampled_G]
        begins_G = np.diff(version_G, prepend=-1) != 0
        spans_C2 = np.stack([sampled_G[begins_G], version_G[begins_G]], 1)
        return Rollout(
            tokens_N=self.tokens_N,
            response_N=self.response_N,
            logprobs_N=logprobs_N,
            reward=float(self.reward),
            group=self.group,
            sample=self.sample,
            policy_version=int(spans_C2[0, 1]) if len(spans_C2) else 0,
            turns_U2=turns_of(self.response_N),
            routes=self.routes(shape),
            versions_C2=spans_C2 if len(spans_C2) > 1 else None,
        )

    @property
    def version_N(self) -> np.ndarray:
        """The policy version that sampled each token, -1 for tokens that were not sampled."""
        spans_C2 = np.array(self.versions or [(0, 0)], np.int64)
        # Example: spans that begin at 0 and 4. The forward pass of token 4 is the first one of the
        # second policy, so that token 5 is the first one that this policy sampled.
        begun_N = np.searchsorted(spans_C2[:, 0], np.arange(len(self.tokens_N)), side="left") - 1
        return np.where(self.response_N, spans_C2[begun_N, 1], -1)


def read_turns(
    rows: Sequence[Any], rollouts: Sequence[Any], group_size: int, first_group: int
) -> list[Turn]:
    """The sequences of `prepare_data_for_update`, without those that only fill up a batch.

    Args:
        rows: each is a pair of a rollout and the index of one of its turns; or a rollout with all
            its turns as one sequence; or None or a pair with None, which only fills up a batch.
        rollouts: the collection's rollouts, group by group.
        group_size: rollouts of a group.
        first_group: the number of the first group.

    Raises:
        ValueError: a rollout has no token ids or no log-probs.
    """
    numbers = {id(rollout): number for number, rollout in enumerate(rollouts)}
    samples: Counter[int] = Counter()
    turns: list[Turn] = []
    for row in rows:
        rollout, index = row if isinstance(row, tuple) else (row, None)
        if rollout is None:
            continue
        number = numbers[id(rollout)]
        group = number // group_size
        name = f"rollout {number} (group {group}, environment {rollout.env_id})"
        name += ", all turns" if index is None else f", turn {index}"
        indices = [*range(len(rollout.trajectory))] if index is None else [index]
        turns.append(_read_turn(rollout, indices, name, first_group + group, samples[group]))
        samples[group] += 1
    return turns


def _read_turn(rollout: Any, indices: list[int], name: str, group: int, sample: int) -> Turn:
    """The sequence of the turns `indices`; each begins with the tokens of the one before."""
    masks = getattr(rollout, "generation_mask", None)
    if masks is None or rollout.logprobs is None:
        raise ValueError(
            f"{name}: its agent returns text, and routes belong to tokens: use an agent that "
            "returns token ids, a generation mask and log-probs (TokenRollout)"
        )
    tokens_N = np.array(rollout.trajectory[indices[-1]], np.int32)
    response_N = np.zeros(len(tokens_N), bool)
    for index in indices:
        response_N[: len(masks[index])] |= np.array(masks[index], bool)
    routes = getattr(rollout, "routes", None) or [None] * len(rollout.trajectory)
    return Turn(
        name=name,
        tokens_N=tokens_N,
        response_N=response_N,
        logprobs=[logprob for index in indices for logprob in rollout.logprobs[index]],
        sent=[(len(rollout.trajectory[index]), routes[index]) for index in indices],
        reward=rollout.reward,
        group=group,
        sample=sample,
        versions=_versions(getattr(rollout, "policy_epoch", None), masks, indices),
    )


def _versions(epochs: Any, masks: Any, indices: list[int]) -> list[tuple[int, int]]:
    """`Turn.versions` of a sequence.

    The versions of a turn after the first begin at the forward pass that sampled the turn's first
    token; the tokens before are of earlier turns.
    """
    spans: list[tuple[int, int]] = []
    for index in indices if epochs else ():
        sampled = np.flatnonzero(masks[index])
        begin = int(sampled[0]) - 1 if len(spans) and len(sampled) else 0
        spans += [(max(token, begin), version) for token, version in epochs[index]]
    return spans


class TurnRoutes:
    """The routes of all turns of a collection, by row id, for `ModelRoutes` and the witness.

    Args:
        info: the model's MoE layers, experts and top-k.
        turns: the turns, in the order of the loop.

    Attributes:
        without: the turns of which the engine did not send all routes.

    Raises:
        ValueError: a turn has routes that no router of this model can take; the message names the
            turn.
    """

    def __init__(self, info: MoEShape, turns: Sequence[Turn]) -> None:
        self.info, self.turns = info, turns
        lengths = [len(turn.tokens_N) - 1 for turn in turns]
        self.first_M = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        shape = (len(info.moe_layers), int(self.first_M[-1]), info.topk)
        self.ids_LTK = np.zeros(shape, id_dtype(info.num_experts))
        self.recorded_T = np.zeros(shape[1], bool)
        for first, turn in zip(self.first_M, turns, strict=False):
            routes = turn.routes(info)
            self.ids_LTK[:, first : first + routes.num_rows] = routes.ids_LTK
            self.recorded_T[first : first + routes.num_rows] = routes.recorded_T
        self.without = [turn for turn in turns if turn.lacks_routes]
        # For each row its token, and the policy version that sampled the token after it.
        self.tokens_T = _joined([turn.tokens_N[:-1] for turn in turns], np.int32)
        self.version_T = _joined([turn.version_N[1:] for turn in turns], np.int64)

    def routes(
        self, rows_T: np.ndarray, layers: Sequence[int], into_LTK: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The ids `[len(layers), T, K]` of these rows, and which rows are recorded, bool `[T]`.

        Padding has the ids of row 0, and is not recorded.

        Args:
            layers: positions in `info.moe_layers`.
            into_LTK: the array that gets the ids; None for a new one.
        """
        here_T = rows_T >= 0
        # `np.ix_` takes layers and rows at once. To take the layers first would copy all rows.
        ids_LTK = self.ids_LTK[np.ix_(np.array(layers), np.where(here_T, rows_T, 0))]
        if into_LTK is not None:
            into_LTK[...] = ids_LTK
            ids_LTK = into_LTK
        return ids_LTK, self.recorded_T[np.where(here_T, rows_T, 0)] & here_T

    def rows(self, begin: int, end: int, seq_length: int) -> Tensor:
        """The row ids of the turns from `begin` up to `end - 1`, not packed, int64 `[B, S]`.

        A number after the last turn stands for a sample that fills up a batch: all is padding.
        """
        rows_BS = torch.full((end - begin, seq_length), PADDING)
        for sample in range(begin, min(end, len(self.turns))):
            self._put(rows_BS[sample - begin], 0, sample)
        return rows_BS

    def rows_of_bin(self, turns: Sequence[int], starts: Sequence[int], bin_size: int) -> Tensor:
        """The row ids of a packed bin, int64 `[1, S]`.

        Args:
            turns: the indices of the bin's turns in the collection.
            starts: where each turn begins in the bin, and at last where the last turn ends.
        """
        rows_BS = torch.full((1, bin_size), PADDING)
        for turn, start, end in zip(turns, starts, starts[1:], strict=False):
            if turn < len(self.turns):
                self._put(rows_BS[0, :end], start, turn)
        return rows_BS

    def _put(self, rows_S: Tensor, start: int, turn: int) -> None:
        """Write a turn's row ids into `rows_S` from `start` on; what does not fit is cut off."""
        first, end = self.first_M[turn : turn + 2].tolist()
        end = min(end, first + len(rows_S) - start)
        rows_S[start : start + end - first] = torch.arange(first, end)

    def check_tokens(self, rows_BS: Tensor, tokens_BS: Tensor) -> None:
        """Refuse samples with other tokens than those of their rows.

        Args:
            tokens_BS: int64, on the host.

        Raises:
            ValueError: naming the first turn with another token.
        """
        here_BS = rows_BS.numpy() != PADDING
        rows_T = rows_BS.numpy()[here_BS]
        wrong_T = self.tokens_T[rows_T] != tokens_BS.numpy()[here_BS]
        if wrong_T.any():
            turn, token = self.locate(int(rows_T[wrong_T][0]))
            raise ValueError(
                f"{self.turns[turn].name}, token {token}: the loop has another token at the place "
                "of this row: it sorts or packs its turns in another way than this megatron-r3 "
                "knows; report it with your Megatron-LM version"
            )

    def first_of(self, rows_T: np.ndarray) -> np.ndarray:
        """For each row the first row of the row's turn; 0 for padding."""
        turns_T = np.searchsorted(self.first_M, np.maximum(rows_T, 0), side="right") - 1
        return self.first_M[turns_T]

    def locate(self, row: int) -> tuple[int, int]:
        """The index of a row's turn, and the index of the row's token in that turn."""
        turn = int(np.searchsorted(self.first_M, row, side="right")) - 1
        return turn, row - int(self.first_M[turn])

    def rollout(self, turn: int) -> Rollout:
        """A turn as a rollout of a store, for the witness and for `write_collection`."""
        return self.turns[turn].record(self.info)


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)
