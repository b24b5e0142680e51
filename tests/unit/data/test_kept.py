"""Kept sets are made, joined and taken; sets that no sampler can have made are refused.

Shape suffixes (docs/glossary.md): N, V.
"""

from dataclasses import replace

import numpy as np
import pytest

from megatron_r3.data.kept import KeptSets

# tokens 5 9 | 7 3 4, of which the last three were sampled
TOKENS_N = np.array([5, 9, 7, 3, 4], np.int32)
SAMPLED_N = np.array([0, 0, 1, 1, 1], bool)
LOGPROBS_N = np.array([0, 0, -0.5, 0, -1.5], np.float32)
SETS = [[], [], [7, 2], [3], [9, 4, 0]]
KEPT = KeptSets.from_lists(SETS)


def wrong(kept: KeptSets, vocab_size: int | None = None) -> str | None:
    return kept.wrong(TOKENS_N, SAMPLED_N, LOGPROBS_N, vocab_size)


def test_sets_lie_one_behind_the_other_and_ascend() -> None:
    assert KEPT.sizes_N.tolist() == [0, 0, 2, 1, 3]
    assert KEPT.ids_V.tolist() == [2, 7, 3, 0, 4, 9]
    assert KEPT.offsets.tolist() == [0, 0, 0, 2, 3, 6]
    assert [KEPT.of(token).tolist() for token in range(5)] == [[], [], [2, 7], [3], [0, 4, 9]]
    assert wrong(KEPT) is None
    assert wrong(KEPT, 10) is None


def test_take_gives_any_tokens_in_any_order() -> None:
    taken = KEPT.take(np.array([4, -1, 2, 0, 4]))
    assert taken.sizes_N.tolist() == [3, 0, 2, 0, 3]
    assert taken.ids_V.tolist() == [0, 4, 9, 2, 7, 0, 4, 9]
    assert taken.ids_V.dtype == taken.sizes_N.dtype == np.int32
    nothing = KeptSets.from_lists([]).take(np.array([-1, -1]))
    assert nothing.sizes_N.tolist() == [0, 0]
    assert nothing.ids_V.tolist() == []


def test_joined_parts_are_the_whole() -> None:
    whole = KeptSets.joined([KeptSets.from_lists(SETS[:3]), KeptSets.from_lists(SETS[3:])])
    assert np.array_equal(whole.sizes_N, KEPT.sizes_N)
    assert np.array_equal(whole.ids_V, KEPT.ids_V)


@pytest.mark.parametrize(
    ("sets", "reason"),
    [
        ([[], [], [7, 2], [3]], "4 kept sets for 5 tokens"),
        ([[], [], [7, 2], [], [4]], "token 3 was sampled, and has no kept set"),
        ([[], [9], [7, 2], [3], [4]], "token 1 was not sampled, and has a kept set"),
        ([[], [], [7, 2], [3], [9, 0]], "token 4: its kept set lacks the token's id 4"),
        ([[], [], [7, 7], [3], [4]],
         "token 2: its kept set must have each id once, ascending; got 7 before 7"),
        ([[], [], [7, 12], [3], [4, 1]],
         "token 2: its kept set has id 12; ids go from 0 to 9"),
        ([[], [], [7, 2], [3], [4]],
         "token 4: its log-prob is -1.5; it must be 0, because the kept set has this token alone: "
         "the log-probs are not normalised over the kept sets"),
    ],
)  # fmt: skip
def test_impossible_sets_are_refused(sets: list[list[int]], reason: str) -> None:
    assert wrong(KeptSets.from_lists(sets), 10) == reason


def test_impossible_arrays_are_refused() -> None:
    shuffled = replace(KEPT, ids_V=KEPT.ids_V[[1, 0, 2, 3, 4, 5]])
    assert "ascending; got 7 before 2" in str(wrong(shuffled))
    cut = replace(KEPT, ids_V=KEPT.ids_V[:-1])
    assert wrong(cut) == "the sizes of its kept sets add up to 6; there are 5 ids"
    negative = np.array([0, 0, 2, -1, 5], np.int32)
    assert wrong(replace(KEPT, sizes_N=negative)) == "token 3 was sampled, and has no kept set"
    below = np.array([-1, 7, 3, 0, 4, 9], np.int32)
    assert "token 2: its kept set has id -1" in str(wrong(replace(KEPT, ids_V=below)))
    wide = replace(KEPT, ids_V=KEPT.ids_V.astype(np.int64))
    assert wrong(wide) == "the ids of its kept sets must be int32 in one dimension"


@pytest.mark.parametrize("ids", [[1.5], [-1], [2**31], ["a"], [None]])
def test_lists_of_other_things_are_refused(ids: list) -> None:
    with pytest.raises(ValueError, match="token ids are whole numbers from 0 to 2147483647"):
        KeptSets.from_lists([[1], ids])
