"""Kept sets: the tokens that the sampler kept of the vocabulary before it drew one of them.

Top-k and top-p cut tokens off, and the sampler draws from the rest. The probabilities are then
normalised over the kept tokens, so a trainer must normalise over the same tokens to compare its own
probabilities with them. Example: of the probabilities .5 .3 .1 .1, top-k 2 keeps the tokens 0 and
1, so the sampler draws token 1 with .3 / (.5 + .3) = .375.

A set may have one id or the whole vocabulary. So all ids lie in one array, set after set, and a
second array has the size of each set:

    token      0   1   2      3   4
    sizes_N    0   0   2      1   3          tokens 0 and 1 are the prompt, which was not sampled
    ids_V              4 9    7   1 4 6      offsets [0, 0, 0, 2, 3, 6]

Shape suffixes (docs/glossary.md): N, V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_r3.data.values import MOST_TOKEN_ID

# A token that is alone in its kept set has the log-prob 0, give or take rounding far below 1e-3. If
# a log-prob there is less, the log-probs are normalised over the whole vocabulary.
_OF_ONE_TOKEN = 1e-3


@dataclass(frozen=True)
class KeptSets:
    """The kept set of each of N tokens; a token that was not sampled has an empty set.

    Attributes:
        sizes_N: int32, how many ids the set of each token has.
        ids_V: int32, the ids of all sets, one set after the other, ascending inside a set.
    """

    sizes_N: np.ndarray
    ids_V: np.ndarray

    @classmethod
    def from_lists(cls, sets: Sequence[Sequence[int] | np.ndarray]) -> KeptSets:
        """Make kept sets from a list of ids for each token, in any order; [] is an empty set.

        Raises:
            ValueError: an id is not a whole number from 0 to 2**31 - 1.
        """
        sizes_N = np.array([len(one) for one in sets], np.int32)
        arrays = [np.asarray(one) for one in sets if len(one)]
        for one in arrays:
            if one.dtype.kind not in "iu" or one.min() < 0 or one.max() > MOST_TOKEN_ID:
                raise ValueError(f"token ids are whole numbers from 0 to {MOST_TOKEN_ID}")
        ids = [np.sort(one).astype(np.int32) for one in arrays]
        return cls(sizes_N, np.concatenate(ids) if ids else np.zeros(0, np.int32))

    @classmethod
    def none(cls, num_tokens: int) -> KeptSets:
        """Empty sets for this number of tokens."""
        return cls(np.zeros(num_tokens, np.int32), np.zeros(0, np.int32))

    @classmethod
    def joined(cls, parts: Sequence[KeptSets]) -> KeptSets:
        """The sets of all parts, one part after the other."""
        return cls(
            np.concatenate([part.sizes_N for part in parts]),
            np.concatenate([part.ids_V for part in parts]),
        )

    @cached_property
    def offsets(self) -> np.ndarray:
        """Int64 `[N + 1]`: the set of token t is `ids_V[offsets[t] : offsets[t + 1]]`."""
        return np.concatenate([[0], np.cumsum(self.sizes_N, dtype=np.int64)])

    def of(self, token: int) -> np.ndarray:
        """The ids that were kept when this token was drawn; none if the token was not sampled."""
        return self.ids_V[self.offsets[token] : self.offsets[token + 1]]

    def take(self, tokens: np.ndarray) -> KeptSets:
        """The sets of these tokens, in this order.

        Args:
            tokens: indices from 0 to N - 1; -1 gives an empty set.
        """
        there = tokens >= 0
        if not there.any():  # N may be 0 then, so no index is possible
            return KeptSets.none(len(tokens))
        sizes = np.where(there, self.sizes_N[tokens], 0).astype(np.int32)
        starts = np.where(there, self.offsets[tokens], 0)
        # Example: sets of 2 and 3 ids begin at 7 and 0 in ids_V, and at 0 and 2 in the result. The
        # differences, 7 7 -2 -2 -2, plus the places in the result, 0 1 2 3 4, are 7 8 0 1 2.
        own = np.repeat(starts - (np.cumsum(sizes, dtype=np.int64) - sizes), sizes)
        return KeptSets(sizes, self.ids_V[own + np.arange(len(own))])

    def wrong(
        self,
        tokens_N: np.ndarray,
        sampled_N: np.ndarray,
        logprobs_N: np.ndarray,
        vocab_size: int | None = None,
    ) -> str | None:
        """Why these cannot be the kept sets of the given tokens; None if they can be.

        Args:
            tokens_N: the ids of the tokens themselves.
            sampled_N: bool, which tokens were sampled.
            logprobs_N: the log-prob of each sampled token, normalised over its set.
            vocab_size: how many token ids the sampler has; None or 0 if that is not known.
        """
        if wrong := self._wrong_sizes(sampled_N):
            return wrong
        owner_V = np.repeat(np.arange(len(self.sizes_N)), self.sizes_N)
        if wrong := self._wrong_ids(owner_V, vocab_size):
            return wrong
        drawn = owner_V[self.ids_V == tokens_N[owner_V]]
        if len(drawn) != int(sampled_N.sum()):  # `_wrong_ids` refuses a set with an id twice
            token = int(np.setdiff1d(np.flatnonzero(sampled_N), drawn)[0])
            return f"token {token}: its kept set lacks the token's id {int(tokens_N[token])}"
        other = (self.sizes_N == 1) & (logprobs_N < -_OF_ONE_TOKEN)
        if other.any():
            token = int(other.argmax())
            return (
                f"token {token}: its log-prob is {logprobs_N[token]:g}; it must be 0, because the "
                "kept set has this token alone: the log-probs are not normalised over the kept sets"
            )
        return None

    def _wrong_ids(self, owner_V: np.ndarray, vocab_size: int | None) -> str | None:
        """Why the ids are impossible; None if they are possible.

        Args:
            owner_V: for each id, the token that the set belongs to.
        """
        most = min(vocab_size - 1, MOST_TOKEN_ID) if vocab_size else MOST_TOKEN_ID
        outside_V = (self.ids_V < 0) | (self.ids_V > most)
        if outside_V.any():
            place = int(outside_V.argmax())
            return (
                f"token {owner_V[place]}: its kept set has id {self.ids_V[place]}; ids go from 0 "
                f"to {most}"
            )
        unordered = (np.diff(self.ids_V) <= 0) & (np.diff(owner_V) == 0)
        if unordered.any():
            place = int(unordered.argmax())
            return (
                f"token {owner_V[place]}: its kept set must have each id once, ascending; got "
                f"{self.ids_V[place]} before {self.ids_V[place + 1]}"
            )
        return None

    def _wrong_sizes(self, sampled_N: np.ndarray) -> str | None:
        for name, array in (("sizes", self.sizes_N), ("ids", self.ids_V)):
            if not isinstance(array, np.ndarray) or array.dtype != np.int32 or array.ndim != 1:
                return f"the {name} of its kept sets must be int32 in one dimension"
        if self.sizes_N.shape != np.shape(sampled_N):
            return f"{len(self.sizes_N)} kept sets for {len(sampled_N)} tokens"
        wrong_N = (self.sizes_N > 0) != sampled_N
        if wrong_N.any() or (self.sizes_N < 0).any():
            token = int((wrong_N | (self.sizes_N < 0)).argmax())
            there = (
                "was sampled, and has no kept set"
                if sampled_N[token]
                else ("was not sampled, and has a kept set")
            )
            return f"token {token} {there}"
        total = int(self.sizes_N.sum(dtype=np.int64))
        if total != len(self.ids_V):
            return f"the sizes of its kept sets add up to {total}; there are {len(self.ids_V)} ids"
        return None
