"""Where tokens go once hot experts have guests: each goes to one place, and loads are as planned.

Shape suffixes (docs/glossary.md): E, I, L, R, T, V.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_r3.balance.moves import Moves, plan_moves
from megatron_r3.balance.places import own_places, place_tokens


def moves_of(*moves):
    """Moves (layer, expert, rank, tokens) as they are planned."""
    return Moves(*np.array(moves, np.int64).reshape(-1, 4).T, load_LR=np.zeros((0, 0)))


def test_the_example():
    """Two ranks send 4 and 5 tokens to expert 0; its guest on rank 1 takes 3 of them."""
    counts_RLE = np.array([[[4, 1, 0, 2]], [[5, 0, 1, 1]]])
    moves = moves_of((0, 0, 1, 3))
    counts_RLI, _ = place_tokens(counts_RLE, moves, slots=1, rank=0)
    assert own_places(4, 2, 1).tolist() == [0, 1, 3, 4]
    # rank 0: places 0 1 2, rank 1: places 3 4 5, the guest in the last one
    assert counts_RLI[:, 0].tolist() == [[4, 1, 0, 0, 2, 0], [2, 0, 0, 1, 1, 3]]
    bounds = {}  # place, low, high
    for rank in range(2):
        _, (guests,) = place_tokens(counts_RLE, moves, slots=1, rank=rank)
        expert_I, place_V, low_V, high_V = guests.on_device(torch.device("cpu"))
        assert expert_I.tolist() == [0, 1, 0, 2, 3, 0]
        bounds[rank] = [*zip(*(a.tolist() for a in (place_V, low_V, high_V)), strict=True)]
        assert (guests.sends, guests.receives, guests.expert_of_slot) == (
            ([[], [0]], [0, 0], []) if rank == 0 else ([[], []], [1, 0], [0])
        )
    assert bounds == {0: [(5, 4, 4), (0, 0, 4), (2, 0, 0)], 1: [(5, 2, 5), (0, 0, 2), (2, 0, 0)]}


def test_a_layer_without_moves_has_no_guests():
    counts_RLE = np.array([[[4, 1], [1, 1]], [[5, 0], [1, 0]]])
    counts_RLI, guests = place_tokens(counts_RLE, moves_of((0, 0, 1, 3)), slots=2, rank=1)
    assert guests[1] is None
    assert counts_RLI[:, 1].tolist() == [[1, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0]]


@st.composite
def loads(draw):
    ranks, num_local = draw(st.sampled_from([(2, 2), (2, 4), (3, 1), (4, 2), (8, 2)]))
    layers = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    popular_LE = np.exp(draw(st.floats(0, 3)) * rng.standard_normal((layers, ranks * num_local)))
    counts_RLE = rng.poisson(popular_LE, (ranks, layers, ranks * num_local))
    return counts_RLE.astype(np.int32), draw(st.integers(1, 3))


def moves_for(counts_RLE, slots):
    """The moves of a plan that copies experts for any gain."""
    return plan_moves(counts_RLE.sum(0), len(counts_RLE), slots, least_tokens=1, least_skew=1.0)


@given(loads())
def test_every_token_goes_to_one_place_of_its_expert(case):
    counts_RLE, slots = case
    num_ranks, num_layers, num_experts = counts_RLE.shape
    num_local = num_experts // num_ranks
    moves = moves_for(counts_RLE, slots)
    own_E = own_places(num_experts, num_ranks, slots)
    for rank in range(num_ranks):
        counts_RLI, guests = place_tokens(counts_RLE, moves, slots, rank)
        by_rank = counts_RLI.sum(0).reshape(num_layers, num_ranks, num_local + slots)
        assert np.array_equal(by_rank.sum(2), moves.load_LR)
        for layer, of_layer in enumerate(guests):
            if of_layer is None:
                assert np.array_equal(counts_RLI[rank, layer, own_E], counts_RLE[rank, layer])
                continue
            expert_I, place_V, low_V, high_V = (
                part.numpy() for part in of_layer.on_device(torch.device("cpu"))
            )
            for expert in range(num_experts):
                total = counts_RLE[rank, layer, expert]
                shared = expert_I[place_V] == expert
                covered = np.zeros(total, int)
                for low, high in zip(low_V[shared], high_V[shared], strict=True):
                    covered[low:high] += 1
                if expert in moves.expert_V[moves.layer_V == layer]:
                    assert (covered == 1).all()
            assert np.array_equal(counts_RLI[rank, layer, place_V], high_V - low_V)


@given(loads(), st.integers(0, 2**32))
def test_each_token_keeps_its_experts_and_probabilities(case, seed):
    counts_RLE, slots = case
    num_experts = counts_RLE.shape[2]
    moves = moves_for(counts_RLE, slots)
    counts_RLI, guests = place_tokens(counts_RLE, moves, slots, rank=0)
    rng = np.random.default_rng(seed)
    for layer, of_layer in enumerate(guests):
        if of_layer is None:
            continue
        counts_E = counts_RLE[0, layer]
        map_TE = torch.zeros(counts_E.max(initial=0) + 3, num_experts, dtype=torch.bool)
        for expert, number in enumerate(counts_E):
            map_TE[rng.choice(len(map_TE), number, replace=False), expert] = True
        probs_TE = torch.from_numpy(rng.random(map_TE.shape)) * map_TE
        probs_TI, map_TI = of_layer.to_places(probs_TE, map_TE)
        assert map_TI.sum(0).tolist() == counts_RLI[0, layer].tolist()
        expert_I = of_layer.on_device(torch.device("cpu"))[0]
        back = torch.zeros_like(probs_TE).index_add_(1, expert_I, probs_TI)
        assert torch.equal(back, probs_TE)
        times = torch.zeros_like(probs_TE).index_add_(1, expert_I, map_TI.to(probs_TE.dtype))
        assert torch.equal(times, map_TE.to(probs_TE.dtype))


@given(loads())
def test_what_a_rank_sends_is_what_the_others_receive(case):
    counts_RLE, slots = case
    num_ranks, num_layers, num_experts = counts_RLE.shape
    num_local = num_experts // num_ranks
    moves = moves_for(counts_RLE, slots)
    views = [place_tokens(counts_RLE, moves, slots, rank)[1] for rank in range(num_ranks)]
    for layer in range(num_layers):
        of_ranks = [view[layer] for view in views]
        if of_ranks[0] is None:
            assert of_ranks == [None] * num_ranks
            continue
        for there, guests in enumerate(of_ranks):
            arrive = [
                home * num_local + local
                for home, sender in enumerate(of_ranks)
                for local in sender.sends[there]
            ]
            assert arrive == guests.expert_of_slot
            assert guests.receives == [len(sender.sends[there]) for sender in of_ranks]
            # the places of this rank's slots hold these experts in this order
            first = there * (num_local + slots) + num_local
            expert_I, place_V, _, _ = guests.on_device(torch.device("cpu"))
            assert {*range(first, first + slots)} <= {*place_V.tolist()}
            assert expert_I[first : first + len(arrive)].tolist() == arrive


@pytest.mark.parametrize("slots", [1, 2])
def test_without_moves_counts_are_those_of_the_experts(slots):
    counts_RLE = np.arange(16).reshape(2, 2, 4)
    counts_RLI, guests = place_tokens(counts_RLE, moves_of(), slots, rank=0)
    assert guests == [None, None]
    assert np.array_equal(counts_RLI[:, :, own_places(4, 2, slots)], counts_RLE)
    assert counts_RLI.sum() == counts_RLE.sum()
