"""Which experts get guests: no rank above the limit, no slot used twice, each token counted once.

Shape suffixes (docs/glossary.md): E, L, O, R, V.
"""

from itertools import pairwise, product

import numpy as np
import pytest

from megatron_r3.balance.moves import plan_moves, rank_load, skew


def planned(load_LE, ranks, slots, **limits):
    """Moves without the limits that keep small loads from being moved."""
    return plan_moves(
        np.array(load_LE), ranks, slots, **{"least_tokens": 1, "least_skew": 1.0, **limits}
    )


def load_after(load_LE, ranks, moves):
    """The load of each rank, one move at a time."""
    num_local = load_LE.shape[1] // ranks
    load_LR = rank_load(load_LE, ranks)
    for layer, expert, rank, tokens in zip(
        moves.layer_V, moves.expert_V, moves.rank_V, moves.tokens_V, strict=True
    ):
        load_LR[layer, expert // num_local] -= tokens
        load_LR[layer, rank] += tokens
    return load_LR


def some_loads(seed, layers, experts, spread=1.0, tokens=100_000):
    rng = np.random.default_rng(seed)
    shares_LE = np.exp(rng.normal(0, spread, (layers, experts)))
    shares_LE /= shares_LE.sum(1, keepdims=True)
    return np.stack([rng.multinomial(tokens, shares_E) for shares_E in shares_LE])


def test_the_example():
    moves = planned([[6, 2, 1, 1]], 2, 1)
    assert (moves.layer_V.tolist(), moves.expert_V.tolist()) == ([0], [0])
    assert (moves.rank_V.tolist(), moves.tokens_V.tolist()) == ([1], [3])
    assert moves.load_LR.tolist() == [[5, 5]]


@pytest.mark.parametrize(("ranks", "slots", "domain"), [*product((2, 4, 8), (1, 2, 3), (None, 2))])
def test_moves_are_possible_and_their_load_is_what_they_say(ranks, slots, domain):
    load_LE = some_loads(ranks + slots, 6, 32)
    moves = planned(load_LE, ranks, slots, domain=domain)
    assert np.array_equal(moves.load_LR, load_after(load_LE, ranks, moves))
    assert moves.load_LR.sum(1).tolist() == load_LE.sum(1).tolist()
    assert (skew(moves.load_LR) <= skew(rank_load(load_LE, ranks))).all()
    guests = [*zip(moves.layer_V.tolist(), moves.rank_V.tolist(), strict=True)]
    assert guests
    assert max(guests.count(guest) for guest in guests) <= slots
    copies = [
        *zip(*(a.tolist() for a in (moves.layer_V, moves.expert_V, moves.rank_V)), strict=True)
    ]
    assert len(set(copies)) == len(copies)  # no rank has an expert twice
    home_V = moves.expert_V // (32 // ranks)
    assert (home_V != moves.rank_V).all()
    if domain:
        assert (home_V // domain == moves.rank_V // domain).all()
    moved_LE = np.zeros_like(load_LE)
    np.add.at(moved_LE, (moves.layer_V, moves.expert_V), moves.tokens_V)
    assert (moved_LE <= load_LE).all()


def test_layers_are_planned_as_each_alone():
    load_LE = some_loads(3, 12, 64)
    together = planned(load_LE, 8, 2)
    for layer in range(12):
        alone = planned(load_LE[layer : layer + 1], 8, 2)
        here = together.layer_V == layer
        for name in ("expert_V", "rank_V", "tokens_V"):
            assert np.array_equal(getattr(together, name)[here], getattr(alone, name))
        assert np.array_equal(together.load_LR[layer], alone.load_LR[0])


@pytest.mark.parametrize(
    ("ranks", "share", "slots", "most"), [(2, 0.75, 2, 1.02), (4, 0.55, 1, 1.05)]
)
def test_a_rank_that_has_most_of_the_load(ranks, share, slots, most):
    # rank 0 has this share of all tokens, the others the rest; inside a rank experts are uneven
    inside_RO = np.exp(np.random.default_rng(0).normal(0, 1, (ranks, 16 // ranks)))
    of_ranks_R1 = np.array([[share]] + [[(1 - share) / (ranks - 1)]] * (ranks - 1))
    shares_RO = inside_RO / inside_RO.sum(1, keepdims=True) * of_ranks_R1
    load_LE = np.round(shares_RO.reshape(1, 16) * 1_000_000).astype(np.int64)
    assert skew(rank_load(load_LE, ranks))[0] == pytest.approx(share * ranks, rel=1e-3)
    assert skew(planned(load_LE, ranks, slots).load_LR)[0] <= most


def test_more_slots_do_not_make_it_worse():
    load_LE = some_loads(5, 8, 64, spread=1.5)
    means = [skew(planned(load_LE, 8, slots).load_LR).mean() for slots in range(4)]
    assert all(after <= before for before, after in pairwise(means))
    assert means[0] > 1.5
    assert means[3] < 1.05


def test_no_guest_has_few_tokens():
    load_LE = some_loads(7, 6, 32, tokens=10_000)
    assert planned(load_LE, 4, 2).tokens_V.min() < 300
    moves = planned(load_LE, 4, 2, least_tokens=300)
    assert len(moves.tokens_V) > 0
    assert moves.tokens_V.min() >= 300


def test_a_small_excess_sends_as_many_as_pay():
    """600 too many at home are too few for a guest: it gets 1000, and the other rank is busiest."""
    moves = planned(np.array([[2200, 1000]]), 2, 1, least_tokens=1000)
    assert moves.tokens_V.tolist() == [1000]
    assert moves.load_LR.tolist() == [[1200, 2000]]


def test_a_layer_that_is_even_enough_has_no_guests():
    load_LE = np.array([[104, 96], [106, 94], [0, 0]]) * 1000
    moves = planned(load_LE, 2, 1, least_skew=1.05)
    assert moves.layer_V.tolist() == [1]
    assert moves.load_LR[0].tolist() == [104_000, 96_000]
    assert moves.load_LR[2].tolist() == [0, 0]


def test_without_slots_nothing_moves():
    load_LE = some_loads(9, 3, 16)
    moves = planned(load_LE, 4, 0)
    assert len(moves.tokens_V) == 0
    assert np.array_equal(moves.load_LR, rank_load(load_LE, 4))
