"""The counting behind the dispatch check, and that it can say no."""

import numpy as np
import torch

from megatron_r3.train.witness import matches, row_hashes


def pairs(*items):
    return np.array(items, np.uint64).reshape(-1, 2)


def matched(expected, ignored, received, weightless=None):
    return matches(expected, ignored, received, pairs() if weightless is None else weightless)


def test_everything_arrived_in_any_order():
    sent = pairs((1, 0), (1, 3), (2, 0), (2, 5))
    assert matched(sent, pairs(), sent[::-1]) == (4, 4)


def test_a_wrong_expert_a_lost_and_a_doubled_token_show():
    sent = pairs((1, 0), (1, 3), (2, 0))
    assert matched(sent, pairs(), pairs((1, 0), (1, 4), (2, 0))) == (2, 3)
    assert matched(sent, pairs(), sent[:2]) == (2, 3)
    assert matched(sent, pairs(), np.concatenate([sent, sent[:1]])) == (3, 4)


def test_padding_does_not_count_either_way():
    sent, padding = pairs((1, 0), (2, 3)), pairs((9, 0), (9, 1))
    assert matched(sent, padding, np.concatenate([padding, sent])) == (2, 2)
    assert matched(sent, padding, np.concatenate([padding, sent[:1], pairs((2, 4))])) == (1, 2)


def test_pairs_of_weight_0_count_only_where_they_were_recorded():
    sent, added = pairs((1, 0), (2, 3)), pairs((1, 4), (2, 0))
    received = np.concatenate([sent, added])
    assert matched(sent, pairs(), received) == (2, 4)
    assert matched(sent, pairs(), received, added) == (2, 2)
    # a recorded pair may have weight 0 too, and is missed if it does not arrive
    assert matched(sent, pairs(), received, np.concatenate([added, sent[:1]])) == (2, 2)
    assert matched(sent, pairs(), received[1:], added) == (1, 2)
    assert matched(sent, pairs(), np.concatenate([received, pairs((2, 5))]), added) == (2, 3)


def test_equal_tokens_count_as_often_as_they_were_sent():
    sent = pairs((1, 0), (1, 0), (1, 2))
    assert matched(sent, pairs(), pairs((1, 0), (1, 2), (1, 2))) == (2, 3)


def test_hashes_tell_rows_apart_by_their_bytes():
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.randn(200, 16).to(dtype)
        hashes = row_hashes(rows)
        assert len(set(hashes.tolist())) == len({tuple(r.tolist()) for r in rows})
        changed = rows.clone()
        changed[7, 3] += 1
        assert (row_hashes(changed) != hashes).nonzero()[0].tolist() == [7]
