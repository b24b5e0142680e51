"""A batch field in the router's order, against a brute-force walk over Megatron's layout."""

import pytest
import torch

from megatron_r3.replay.rows import router_order, spread_padding


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
