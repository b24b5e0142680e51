"""What one microbatch keeps, counts and refuses.

Shape suffixes (docs/glossary.md): E, K, T.
"""

import pytest
import torch
from some_routes import E, K, T, chosen, scores, some_routes

from megatron_r3.replay.active import MicrobatchRoutes, Mode, ReplayError, recording, replaying
from megatron_r3.replay.tally import Tally

IDS = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 0], [1, 3, 5]], dtype=torch.uint8)


def choosing(ids_TK, num_experts=E):
    """Scores whose K best experts are `ids_TK`, the best one first."""
    scores_TE = torch.zeros(len(ids_TK), num_experts)
    return scores_TE.scatter(1, ids_TK.long(), torch.arange(K, 0, -1.0).expand(len(ids_TK), K))


def test_a_layer_without_routes_is_an_error():
    with pytest.raises(ReplayError, match=r"layer 2 has no routes .* \[1\]"):
        chosen(MicrobatchRoutes({1: some_routes()}), scores(), layer=2)


@pytest.mark.parametrize(
    ("ids", "what"),
    [
        (
            some_routes()[:-1],
            r"shape \[5, 3\]; expected \[T, K\] \[6, 3\]: the router has 6 tokens",
        ),
        (some_routes()[:, :1], r"shape \[6, 1\]; expected \[T, K\] \[6, 3\]: moe_router_topk is 3"),
        (some_routes().view(2, 3, 3), r"shape \[2, 3, 3\].*ids.transpose\(0, 1\).reshape\(-1, K\)"),
        (some_routes().reshape(-1), r"shape \[18\]; expected \[T, K\] \[6, 3\]: one row for each"),
        (some_routes().numpy(), r"are numpy.ndarray uint8 \[6, 3\]; expected a tensor"),
        (some_routes().tolist(), r"are list; expected a tensor \[T, K\]"),
    ],
)
def test_ids_of_another_shape_or_type_are_an_error(ids, what):
    with pytest.raises(ReplayError, match=f"layer 1.*{what}"):
        chosen(MicrobatchRoutes({1: ids}), scores())


@pytest.mark.parametrize("ids", [some_routes(), some_routes().numpy(), [some_routes()], None])
def test_ids_that_are_no_dict_are_an_error(ids):
    with pytest.raises(ReplayError, match=r"expected a dict with the ids \[T, K\] of each layer"):
        MicrobatchRoutes(ids)


@pytest.mark.parametrize("name", ["live_T", "counted_T", "watched_T", "padding_T"])
def test_masks_that_are_no_bool_tensor_of_tokens_are_an_error(name):
    right = torch.ones(T, dtype=torch.bool)
    others = {"counted_T": right} if name == "watched_T" else {}

    def given(mask):
        if name in ("counted_T", "watched_T"):
            return MicrobatchRoutes({1: some_routes()}, tally=Tally(**others | {name: mask}))
        return MicrobatchRoutes({1: some_routes()}, **{name: mask})

    for mask in (right.int(), right.numpy(), right[:, None]):
        with pytest.raises(ReplayError, match=f"{name} is .*; expected a bool tensor"):
            given(mask)
    chosen(given(right), scores())


def test_missing_rows_are_live_once_and_then_kept():
    live_T = torch.tensor([False, True, False, False, True, False])
    ids, s = some_routes(), scores()
    microbatch = MicrobatchRoutes({1: ids}, live_T=live_T)
    first = chosen(microbatch, s)
    assert torch.equal(first[live_T], s.topk(K, dim=1).indices.sort(dim=1).values[live_T])
    assert torch.equal(first[~live_T], ids.long().sort(dim=1).values[~live_T])
    # a recompute sees other scores (noise, rounding) and must repeat the choice
    assert torch.equal(chosen(microbatch, scores(9)), first)


def test_without_the_write_back_a_recompute_would_differ():
    live_T = torch.ones(T, dtype=torch.bool)
    first = chosen(MicrobatchRoutes({1: some_routes()}, live_T=live_T), scores())
    second = chosen(MicrobatchRoutes({1: some_routes()}, live_T=live_T), scores(9))
    assert not torch.equal(first, second)


def test_a_row_that_lacks_a_route_in_one_layer_is_live_in_that_layer_only():
    live_T = torch.tensor([False, True, False, False, False, False])
    ids, s = some_routes(), scores()
    microbatch = MicrobatchRoutes({1: ids, 2: ids}, live_T={2: live_T})
    given, mixed = chosen(microbatch, s), chosen(microbatch, s, layer=2)
    best, wanted = s.topk(K, dim=1).indices.sort(dim=1).values, ids.long().sort(dim=1).values
    assert torch.equal(given, wanted)
    assert torch.equal(mixed, torch.where(live_T[:, None], best, wanted))
    assert not torch.equal(mixed, wanted)
    assert torch.equal(chosen(microbatch, scores(9), layer=2), mixed)
    assert torch.equal(microbatch.begin_layer(1, s, K)[0], ids)
    assert MicrobatchRoutes({1: ids}, live_T={2: live_T}).begin_layer(1, s, K)[1] is None
    fresh = MicrobatchRoutes({2: ids}, live_T={2: live_T})
    assert torch.equal(fresh.begin_layer(2, s, K)[1], live_T)


def test_wrong_ids_are_allowed_only_where_that_layer_is_live():
    live_T = torch.tensor([False, True, False, False, False, False])
    wrong = some_routes()
    wrong[1] = wrong[1, 0]
    chosen(MicrobatchRoutes({1: some_routes(), 2: wrong}, live_T={2: live_T}), scores(), layer=2)
    with pytest.raises(ReplayError, match="layer 2, token 1"):
        chosen(MicrobatchRoutes({1: some_routes(), 2: wrong}, live_T={1: live_T}), scores())


def test_a_token_that_chose_live_is_not_counted_as_a_mismatch():
    live_T, everything_T = torch.zeros(T, dtype=torch.bool), torch.ones(T, dtype=torch.bool)
    live_T[2] = True
    s = scores()
    ids = s.topk(K, dim=1, largest=False).indices
    microbatch = MicrobatchRoutes({1: ids}, live_T=live_T, tally=Tally(everything_T))
    chosen(microbatch, s)
    assert microbatch.tally.mismatched[1].item() == T - 1


def test_watched_tokens_are_counted_beside_the_counted_ones():
    s = scores()
    right, wrong = s.topk(K, dim=1).indices, s.topk(K, dim=1, largest=False).indices
    counted = torch.tensor([False, False, True, True, True, False])
    watched = torch.tensor([True, True, True, True, True, False])
    bad = {1: [0, 2, 5], 2: [0, 3, 5]}
    ids = {layer: right.clone() for layer in bad}
    for layer, at in bad.items():
        ids[layer][at] = wrong[at]
    tally = Tally(counted, watched)
    microbatch = MicrobatchRoutes(ids, tally=tally)
    for layer in (1, 2, 1, 2):  # the second time is a recompute
        chosen(microbatch, s, layer)
    assert {layer: int(n) for layer, n in tally.mismatched.items()} == {1: 1, 2: 1}
    assert {layer: int(n) for layer, n in tally.mismatched_watched.items()} == {1: 2, 2: 2}
    assert tally.mismatches_T.tolist() == [2, 0, 1, 1, 0, 0]
    assert tally.mismatched_T.tolist() == [False, False, True, True, False, False]
    # a gate that compares by itself gets the wider mask, and says what differs
    gate = MicrobatchRoutes(ids, tally=tally.fresh())
    for layer, at in bad.items():
        taken, _, compared = gate.begin_layer(layer, s, K)
        differs = torch.zeros(T, dtype=torch.bool)
        differs[at] = True
        gate.end_layer(layer, taken, differs & compared)
        assert gate.begin_layer(layer, s, K)[2] is None
    assert gate.tally.mismatches_T.tolist() == tally.mismatches_T.tolist()
    assert gate.tally.mismatched == tally.mismatched
    assert gate.fresh().tally.watched_T is watched
    assert gate.fresh().tally.mismatches_T is None


def test_a_tally_is_of_one_micro_batch():
    tally = Tally(torch.ones(T, dtype=torch.bool))
    first = MicrobatchRoutes({1: some_routes()}, tally=tally)
    with pytest.raises(ReplayError, match="give each micro-batch a Tally of its own"):
        MicrobatchRoutes({1: some_routes()}, tally=tally)
    assert first.fresh().tally is not tally
    with pytest.raises(ReplayError, match="counted_T is NoneType; expected a bool tensor"):
        MicrobatchRoutes({1: some_routes()}, tally=Tally(None))


def test_observing_stays_live():
    ids, s = some_routes(), scores()
    microbatch = MicrobatchRoutes({1: ids}, tally=Tally(torch.ones(T).bool()), mode=Mode.OBSERVE)
    assert torch.equal(chosen(microbatch, s), s.topk(K, dim=1).indices.sort(dim=1).values)
    assert microbatch.tally.mismatched[1] > 0


def test_wrong_ids_name_layer_and_token():
    ids = {1: some_routes(), 4: some_routes()}
    ids[4][3] = ids[4][3, 0]
    with pytest.raises(ReplayError, match=r"layer 4, token 3: ids .* distinct experts from 0 to 7"):
        chosen(MicrobatchRoutes(ids), scores())
    chosen(MicrobatchRoutes({1: ids[1]}), scores())
    with pytest.raises(ReplayError, match="integers"):
        chosen(MicrobatchRoutes({1: ids[1].float()}), scores())
    with pytest.raises(ReplayError, match="routes of different shapes"):
        chosen(MicrobatchRoutes({1: ids[1], 2: ids[1][:-1]}), scores())


def test_wrong_ids_stay_wrong_for_a_second_pass_and_for_fresh():
    ids = some_routes()
    ids[3] = ids[3, 0]
    given = MicrobatchRoutes({1: ids})
    for microbatch in (given, given, given.fresh(), given.fresh().fresh()):
        with pytest.raises(ReplayError, match="layer 1, token 3"), replaying(microbatch):
            chosen(microbatch, scores())
    interrupted = MicrobatchRoutes({1: ids})
    with pytest.raises(KeyError), replaying(interrupted):  # before a router asks
        raise KeyError
    with pytest.raises(ReplayError, match="layer 1, token 3"), replaying(interrupted.fresh()) as m:
        chosen(m, scores())
    right = MicrobatchRoutes({1: some_routes()})
    for microbatch in (right, right, right.fresh()):
        with replaying(microbatch):
            chosen(microbatch, scores())


def test_recorded_ids_are_those_of_a_model_with_many_experts():
    ids_TK = torch.tensor([[0, 127, 128], [255, 256, 999]])
    with recording() as recorded:
        chosen(recorded, choosing(ids_TK, 1000))
    assert torch.equal(recorded.ids[1].long(), ids_TK)


@pytest.mark.parametrize("mode", [Mode.REPLAY, Mode.OBSERVE])
def test_a_route_mismatches_if_its_set_of_experts_is_another_one(mode):
    chosen_TK = IDS.clone()
    chosen_TK[0] = torch.tensor([2, 0, 1])  # the same set in another order
    chosen_TK[1] = torch.tensor([3, 4, 6])  # two of three
    chosen_TK[2] = torch.tensor([1, 2, 3])  # none of three
    chosen_TK[3] = torch.tensor([0, 2, 4])  # not counted
    counted_T = torch.tensor([True, True, True, False])
    watched_T = torch.ones(4, dtype=torch.bool)
    tally = Tally(counted_T, watched_T)
    microbatch = MicrobatchRoutes({1: IDS, 2: IDS}, mode=mode, tally=tally)
    chosen(microbatch, choosing(chosen_TK))
    chosen(microbatch, choosing(IDS), layer=2)
    chosen(microbatch, choosing(chosen_TK))  # a recompute
    assert tally.mismatched == {1: 2, 2: 0}
    assert tally.mismatched_T.tolist() == [False, True, True, False]
    assert tally.mismatched_watched == {1: 3, 2: 0}
    assert tally.mismatches_T.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("row", [[0, 1, 8], [-1, 1, 2], [3, 3, 1], [7, 0, 7]])
def test_a_row_that_is_no_route_is_named(row):
    ids_TK = IDS.to(torch.int16)
    ids_TK[2] = torch.tensor(row)
    with pytest.raises(ReplayError, match=rf"layer 1, token 2: ids \[{str(row)[1:-1]}\]"):
        chosen(MicrobatchRoutes({1: ids_TK}), choosing(IDS))
    # the row of a token that chooses by itself may be anything
    live_T = torch.tensor([False, False, True, False])
    got_TK = chosen(MicrobatchRoutes({1: ids_TK}, live_T=live_T), choosing(IDS))
    assert torch.equal(got_TK, IDS.long().sort(1).values)


def test_each_forward_pass_chooses_for_itself():
    live_T = torch.tensor([True, False, False, False])
    first, other = choosing(IDS.flip(0)), choosing(IDS.roll(1, 0))
    microbatch = MicrobatchRoutes({1: IDS}, live_T=live_T)
    with replaying(microbatch):
        old_TK = chosen(microbatch, first)
    with pytest.raises(ReplayError, match=r"fresh\(\)"), replaying(microbatch):
        chosen(microbatch, other)
    with replaying(again := microbatch.fresh()):
        new_TK = chosen(again, other)
    for got_TK, scores_TE in ((old_TK, first), (new_TK, other)):
        assert set(got_TK[0].tolist()) == set(scores_TE[0].topk(K).indices.tolist())
        assert torch.equal(got_TK[1:], IDS[1:].long().sort(1).values)
