"""What one microbatch keeps, counts and refuses.

Shape suffixes (docs/glossary.md): E, K, T.
"""

import pytest
import torch

from megatron_r3.replay import MicrobatchRoutes, Mode, ReplayError, recording, replaying

T, E, K = 4, 8, 3
IDS = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 0], [1, 3, 5]], dtype=torch.uint8)


def choosing(ids_TK, num_experts=E):
    """Scores whose K best experts are `ids_TK`, the best one first."""
    scores_TE = torch.zeros(len(ids_TK), num_experts)
    return scores_TE.scatter(1, ids_TK.long(), torch.arange(K, 0, -1.0).expand(len(ids_TK), K))


def ask(microbatch, scores_TE, layer=1):
    """The experts that a router gets."""
    return microbatch.topk(layer, scores_TE, K, lambda: scores_TE.topk(K, dim=1))[1]


def test_recorded_ids_are_those_of_a_model_with_many_experts():
    ids_TK = torch.tensor([[0, 127, 128], [255, 256, 999]])
    with recording() as recorded:
        ask(recorded, choosing(ids_TK, 1000))
    assert torch.equal(recorded.ids[1].long(), ids_TK)


@pytest.mark.parametrize("mode", [Mode.REPLAY, Mode.OBSERVE])
def test_a_route_mismatches_if_its_set_of_experts_is_another_one(mode):
    chosen_TK = IDS.clone()
    chosen_TK[0] = torch.tensor([2, 0, 1])  # the same set in another order
    chosen_TK[1] = torch.tensor([3, 4, 6])  # two of three
    chosen_TK[2] = torch.tensor([1, 2, 3])  # none of three
    chosen_TK[3] = torch.tensor([0, 2, 4])  # not counted
    counted_T = torch.tensor([True, True, True, False])
    watched_T = torch.ones(T, dtype=torch.bool)
    masks = {"counted_T": counted_T, "watched_T": watched_T}
    microbatch = MicrobatchRoutes({1: IDS, 2: IDS}, mode=mode, **masks)
    ask(microbatch, choosing(chosen_TK))
    ask(microbatch, choosing(IDS), layer=2)
    ask(microbatch, choosing(chosen_TK))  # a recompute
    assert microbatch.mismatched == {1: 2, 2: 0}
    assert microbatch.mismatched_T.tolist() == [False, True, True, False]
    assert microbatch.mismatched_watched == {1: 3, 2: 0}
    assert microbatch.mismatches_T.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("row", [[0, 1, 8], [-1, 1, 2], [3, 3, 1], [7, 0, 7]])
def test_a_row_that_is_no_route_is_named(row):
    ids_TK = IDS.to(torch.int16)
    ids_TK[2] = torch.tensor(row)
    with pytest.raises(ReplayError, match=rf"layer 1, token 2: ids \[{str(row)[1:-1]}\]"):
        ask(MicrobatchRoutes({1: ids_TK}), choosing(IDS))
    # the row of a token that chooses by itself may be anything
    live_T = torch.tensor([False, False, True, False])
    got_TK = ask(MicrobatchRoutes({1: ids_TK}, live_T=live_T), choosing(IDS))
    assert torch.equal(got_TK.sort(1).values, IDS.long().sort(1).values)


def test_each_forward_pass_chooses_for_itself():
    live_T = torch.tensor([True, False, False, False])
    first, other = choosing(IDS.flip(0)), choosing(IDS.roll(1, 0))
    microbatch = MicrobatchRoutes({1: IDS}, live_T=live_T)
    with replaying(microbatch):
        old_TK = ask(microbatch, first)
    with pytest.raises(ReplayError, match=r"fresh\(\)"), replaying(microbatch):
        ask(microbatch, other)
    with replaying(again := microbatch.fresh()):
        new_TK = ask(again, other)
    for got_TK, scores_TE in ((old_TK, first), (new_TK, other)):
        assert set(got_TK[0].tolist()) == set(scores_TE[0].topk(K).indices.tolist())
        assert torch.equal(got_TK[1:].sort(1).values, IDS[1:].long().sort(1).values)
