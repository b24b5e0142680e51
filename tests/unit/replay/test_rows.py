"""A batch field in the router's order, against a walk over Megatron's layout; experts, counted."""

import numpy as np
import pytest
import torch

from megatron_r3.replay.routes import RoutesError
from megatron_r3.replay.rows import count_tokens, router_order, spread_padding

L, K, E = 3, 2, 8


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_router_order_is_s_major_and_split_along_the_sequence(parts):
    batch, length = 3, 8
    rows = torch.arange(batch * length).reshape(batch, length)
    hidden = rows.t()  # [S, B], as Megatron's embedding makes it
    for rank, chunk in enumerate(hidden.chunk(parts)):
        assert torch.equal(router_order(rows, parts, rank), chunk.reshape(-1))


def test_batch_order_would_be_wrong():
    rows = torch.arange(6).reshape(2, 3)
    assert not torch.equal(router_order(rows), rows.reshape(-1))


def test_a_sequence_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"7 tokens .* size 2"):
        router_order(torch.zeros(1, 7), 2, 0)


@pytest.mark.parametrize(("topk", "experts"), [(4, 16), (8, 128), (3, 7), (1, 5)])
def test_padding_is_distinct_and_spread(topk, experts):
    ids = spread_padding(experts * 3, topk, experts)
    assert all(len(set(row.tolist())) == topk for row in ids)
    load = torch.bincount(ids.reshape(-1), minlength=experts)
    assert load.min() == load.max() == 3 * topk


def ids_of(tokens):
    scores = np.random.default_rng(0).random((L, tokens, E))
    return np.argsort(scores, axis=-1)[..., :K].astype(np.uint8)


def test_counts_are_those_of_a_loop():
    ids = ids_of(37)
    want = [[(layer == expert).sum() for expert in range(E)] for layer in ids]
    assert np.array_equal(count_tokens(ids, E), want)
    assert count_tokens(ids[:, :0], E).sum() == 0
    assert count_tokens(ids[:0], E).shape == (0, E)
    many = np.full((1, 3, 1), 300, np.int16)
    assert count_tokens(many, 512)[0, 300] == 3


@pytest.mark.parametrize(
    ("wrong", "dtype"), [(8, np.uint8), (40_000, np.uint16), (-1, np.int16), (-1, np.int64)]
)
def test_an_id_out_of_range_is_no_count_of_another_expert(wrong, dtype):
    ids = ids_of(37).astype(dtype)
    count_tokens(ids, E)
    ids[1, 3, 0] = wrong
    with pytest.raises(RoutesError, match="MoE layer 1 has "):
        count_tokens(ids, E)
