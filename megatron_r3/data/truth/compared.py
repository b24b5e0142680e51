"""A rollout, and the routes that another implementation chooses for the same tokens, row by row.

Shape suffixes (docs/glossary.md): C, K, L, N, T, U.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from megatron_r3.data.rollout import Rollout, versions_of
from megatron_r3.replay.routes import MOST_EXPERTS

NO_TURN = -1


@dataclass(frozen=True, eq=False)
class Compared:
    """A rollout and the live routes of its tokens.

    Row t has the routes of token t. Row t counts for the turn and policy version of token t + 1,
    since one forward pass makes row t and draws token t + 1. If token t + 1 was not sampled, row t
    is a row of a prompt.

    Attributes:
        rollout: with the recorded routes.
        live_LTK: the routes that the other implementation chooses, ids of any integer dtype.
        name: what messages call the rollout.
        before_LTK: the routes that the weights before the last update choose; None if they are not
            known.

    Raises:
        ValueError: the live routes, or those before the update, have another shape than the
            recorded routes.
    """

    rollout: Rollout
    live_LTK: np.ndarray
    name: str = "a rollout"
    before_LTK: np.ndarray | None = None

    def __post_init__(self) -> None:
        wanted = self.rollout.routes.ids_LTK.shape
        for live_LTK in (self.live_LTK, self.before_LTK):
            if live_LTK is not None and live_LTK.shape != wanted:
                raise ValueError(
                    f"{self.name}: live routes have the shape {live_LTK.shape}, and recorded "
                    f"routes have {wanted} (layers, tokens, top-k): both must belong to the same "
                    "tokens and MoE layers"
                )

    @property
    def recorded_T(self) -> np.ndarray:
        """Where the engine returned a row, bool."""
        return self.rollout.routes.recorded_T

    @property
    def num_rows(self) -> int:
        """How many rows the rollout has, T."""
        return self.rollout.routes.num_rows

    @cached_property
    def codes_LT(self) -> np.ndarray:
        """The recorded set of experts of each layer and row as one number, uint64."""
        return set_codes(self.rollout.routes.ids_LTK)

    @cached_property
    def live_codes_LT(self) -> np.ndarray:
        """The live set of experts of each layer and row as one number, uint64."""
        return set_codes(self.live_LTK)

    @cached_property
    def same_LT(self) -> np.ndarray:
        """Where the recorded and the live set are the same, bool."""
        return self.codes_LT == self.live_codes_LT

    @cached_property
    def same_before_LT(self) -> np.ndarray:
        """Where the weights before the last update choose the recorded set, bool."""
        assert self.before_LTK is not None
        return self.codes_LT == set_codes(self.before_LTK)

    @cached_property
    def turn_T(self) -> np.ndarray:
        """The turn of each row, from 0 on; `NO_TURN` for rows of a prompt."""
        turn_N = np.full(self.num_rows + 1, NO_TURN)
        for turn, (first, end) in enumerate(self.rollout.spans_U2.tolist()):
            turn_N[first:end] = turn
        return turn_N[1:]

    @cached_property
    def part_T(self) -> np.ndarray:
        """The part of the conversation that each row is in.

        0 is the prompt, 1 the first turn, 2 the text before the second turn, 3 the second turn, ...
        """
        begun_T = np.maximum.accumulate(self.turn_T) + 1
        part_T: np.ndarray = 2 * begun_T - (self.turn_T != NO_TURN)
        return part_T

    @cached_property
    def version_T(self) -> np.ndarray:
        """The policy version of each row.

        A row of a prompt has the version of the next sampled token, or else of the last one.
        """
        rollout = self.rollout
        version_T = versions_of(rollout.versions_C2, rollout.response_N, rollout.policy_version)[1:]
        sampled = np.flatnonzero(version_T >= 0)
        if not len(sampled):
            return np.full(self.num_rows, rollout.policy_version)
        # Example: of the rows 0 to 6, only 2 and 5 predict a sampled token, so `sampled` is 2 5.
        # The rows then get the versions of the rows 2 2 2 5 5 5 5: no such row follows row 5.
        following_T = np.searchsorted(sampled, np.arange(self.num_rows))
        versions: np.ndarray = version_T[sampled[np.minimum(following_T, len(sampled) - 1)]]
        return versions


def part_name(part: int) -> str:
    """What messages call a part of a conversation (`Compared.part_T`)."""
    if part == 0:
        return "the prompts"
    return f"turn {(part + 1) // 2}" if part % 2 else f"the text before turn {part // 2 + 1}"


def set_codes(ids: np.ndarray) -> np.ndarray:
    """One uint64 for each set of ids in the last axis; equal sets have equal numbers.

    The number of a set is the sum modulo 2^64 of random numbers, one for each expert of the set, so
    the order does not matter. Two different sets have the same number with a chance of 2^-64.
    """
    codes: np.ndarray = _numbers()[ids].sum(-1, dtype=np.uint64)
    return codes


@cache
def _numbers() -> np.ndarray:
    """The random number of each expert id."""
    return np.random.default_rng(0).integers(0, 2**64, MOST_EXPERTS, np.uint64)


def row_keys(codes_LT: np.ndarray) -> np.ndarray:
    """One uint64 for each row, `[T]`; rows that are the same in all layers have equal numbers."""
    factors = np.random.default_rng(1).integers(0, 2**63, len(codes_LT), np.uint64) * 2 + 1
    keys: np.ndarray = (codes_LT * factors[:, None]).sum(0, dtype=np.uint64)
    return keys
