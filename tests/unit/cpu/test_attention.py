"""Which tokens a context parallel rank holds, against the definition written out."""

from __future__ import annotations

import pytest
import torch

from megatron_r3.cpu.attention import thd_index, zigzag


def by_definition(length: int, cp_size: int, cp_rank: int) -> list[int]:
    chunk = length // (2 * cp_size)
    mine = (cp_rank, 2 * cp_size - 1 - cp_rank)
    return [t for t in range(length) if t // chunk in mine] if cp_size > 1 else list(range(length))


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_zigzag_is_the_definition(cp_size: int, chunk: int) -> None:
    length = 2 * cp_size * chunk
    parts = [zigzag(length, cp_size, rank).tolist() for rank in range(cp_size)]
    assert parts == [by_definition(length, cp_size, rank) for rank in range(cp_size)]
    assert sorted(t for part in parts for t in part) == list(range(length))


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_a_packed_stream_is_split_sequence_by_sequence(cp_size: int) -> None:
    lengths = [8, 0, 16, 8, 24]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    for rank in range(cp_size):
        expected = [
            int(start) + t
            for start, length in zip(bounds.tolist(), lengths, strict=False)
            for t in (by_definition(length, cp_size, rank) if length else [])
        ]
        assert thd_index(bounds, cp_size, rank).tolist() == expected


def test_balanced_work() -> None:
    """Why it is a zigzag: every rank has as many (query, key) pairs of the causal triangle."""
    work = {int((zigzag(32, 4, rank) + 1).sum()) for rank in range(4)}
    assert len(work) == 1


@pytest.mark.parametrize("length", [6, 1, 31])
def test_a_length_that_does_not_split_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"{length} tokens"):
        zigzag(length, 2, 0)
    with pytest.raises(ValueError, match=f"{length} tokens"):
        thd_index([0, 8, 8 + length], 2, 0)


def test_without_cp_any_length_is_whole() -> None:
    assert zigzag(7, 1, 0).tolist() == list(range(7))
    assert thd_index([0, 7, 10], 1, 0).tolist() == list(range(10))
    assert thd_index([0], 1, 0).tolist() == []
