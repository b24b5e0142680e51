"""The plan against what every rank would count for itself.

Shape suffixes (docs/glossary.md): E, L, T.
"""

import numpy as np
import pytest

from megatron_r3.replay.plan import (
    ExpertRanks,
    PlanError,
    by_owner,
    check_totals,
    layer_sizes,
    padded_counts,
)
from megatron_r3.replay.planner import messages
from megatron_r3.replay.rows import count_tokens

L, K, E = 3, 2, 8
LAYERS = [2, 4, 5]


def routes(tokens, seed):
    scores = np.random.default_rng(seed).random((L, tokens, E))
    return np.argsort(scores, axis=-1)[..., :K].astype(np.uint8)


def test_a_chunk_without_layers_has_no_sizes():
    none, ranks = np.zeros((0, E), np.int64), ExpertRanks(4, 1, 2, 0)
    assert layer_sizes(none, by_owner(none, ranks), ranks, []) == {}


@pytest.mark.parametrize(("expert_size", "tensor_size"), [(1, 1), (4, 1), (2, 2), (1, 2), (8, 1)])
def test_sizes_are_what_really_travels(expert_size, tensor_size):
    size = expert_size * tensor_size
    ids = [routes(5 + 3 * rank, rank) for rank in range(size)]
    counts = np.stack([count_tokens(i, E) for i in ids])
    local = E // expert_size
    owner = lambda expert: expert // local  # noqa: E731
    for me in range(size):
        expert_rank, tensor_rank = divmod(me, tensor_size)
        ranks = ExpertRanks(expert_size, expert_rank, tensor_size, tensor_rank)
        assert ranks.rank == me
        for index, number in enumerate(LAYERS):
            arriving = np.stack([by_owner(count, ranks)[me] for count in counts])
            got = layer_sizes(counts[me], arriving, ranks, LAYERS)[number]
            mine = ids[me][index].ravel()
            # an all-to-all runs among ranks of one tensor rank, a gather among those of one expert
            sent = [(owner(mine) == other).sum() for other in range(expert_size)]
            assert got.input_splits.tolist() == sent

            def arrive(rank, index=index, me=me):
                all_ids = ids[rank][index].ravel()
                return all_ids[owner(all_ids) == me // tensor_size]

            from_peers = [len(arrive(p * tensor_size + tensor_rank)) for p in range(expert_size)]
            assert got.output_splits.tolist() == from_peers
            gathered = [
                sum(len(arrive(p * tensor_size + t)) for p in range(expert_size))
                for t in range(tensor_size)
            ]
            assert got.output_splits_tp.tolist() == gathered
            order = [p * tensor_size + t for t in range(tensor_size) for p in range(expert_size)]
            first = expert_rank * local
            received = [
                [(arrive(rank) == first + expert).sum() for expert in range(local)]
                for rank in order
            ]
            assert got.received.tolist() == received
            assert got.tokens_per_expert.tolist() == np.sum(received, axis=0).tolist()


def test_a_changed_count_is_named():
    counts = np.stack([count_tokens(routes(9, rank), E) for rank in range(4)])
    check_totals(counts.sum(2), LAYERS)
    counts[2, 1, 5] += 1
    with pytest.raises(PlanError, match=r"rank 2 .* sends 19 .* in layer 4, and 18 in layer 2"):
        check_totals(counts.sum(2), LAYERS)


@pytest.mark.parametrize("whole", [False, True])
def test_a_message_is_sent_as_it_lies_in_memory(whole):
    counts_LE, ranks = count_tokens(routes(9, 0), E), ExpertRanks(2, 0, 2, 0)
    of_all = np.broadcast_to(counts_LE, (4, *counts_LE.shape))
    for_rank = of_all if whole else by_owner(counts_LE, ranks)
    sent = messages(for_rank, counts_LE.sum(1), known=True)
    assert (sent.flags.c_contiguous, sent.dtype) == (True, np.int32)
    for rank, row in enumerate(sent):
        assert row.tolist() == [*for_rank[rank].ravel(), *counts_LE.sum(1), 1]


def test_padding_adds_tokens_up_to_a_multiple_or_to_all():
    counts = np.array([[3, 0, 9, 10]], np.int32)
    assert padded_counts(counts, 4, 10).tolist() == [[4, 0, 10, 10]]
    assert padded_counts(counts, 1, 10).tolist() == counts.tolist()
    # token by token, as Megatron does it: the first ones that an expert does not have
    map_TE = np.random.default_rng(0).random((50, E)) < 0.3
    for column in map_TE.T:
        missing = -column.sum() % 16
        padded = column.copy()
        padded[np.flatnonzero(~column)[:missing]] = True
        assert padded_counts(column.sum(), 16, 50) == padded.sum()
