"""The active microbatch: scoped, bound, and never guessed.

Shape suffixes (docs/glossary.md): E, T.
"""

import contextlib
import gc
import re
import threading
import weakref
from collections import OrderedDict

import pytest
import torch

from megatron_r3.gate.reference import replayed_topk
from megatron_r3.replay import (
    MicrobatchRoutes,
    Mode,
    ReplayError,
    active_microbatch,
    bind_to_microbatch,
    recording,
    replaying,
)

T, E, K = 6, 8, 3


def scores(seed=0):
    return torch.randn(T, E, generator=torch.Generator().manual_seed(seed))


def live(scores_TE):
    return lambda: torch.topk(scores_TE, K, dim=1)


def some_routes(seed=1):
    return scores(seed).topk(K, dim=1).indices.to(torch.uint8)


def chosen(microbatch, scores_TE, layer=1):
    return microbatch.topk(layer, scores_TE, K, live(scores_TE))[1].sort(dim=1).values


def test_nothing_is_active_by_default_or_after_an_exception():
    assert active_microbatch() is None
    with pytest.raises(RuntimeError), replaying(MicrobatchRoutes({})):
        raise RuntimeError
    assert active_microbatch() is None


def test_nested_scopes_restore():
    first, second = (MicrobatchRoutes({1: some_routes()}) for _ in range(2))
    with replaying(first):
        chosen(first, scores())
        with replaying(second):
            chosen(second, scores())
            with replaying(None):
                assert active_microbatch() is None
        assert active_microbatch() is first


def test_replays_the_given_experts_with_live_scores():
    ids, s = some_routes(), scores()
    with torch.no_grad():
        values, indices = MicrobatchRoutes({1: ids}).topk(1, s, K, live(s))
    assert torch.equal(indices, ids.long())
    assert torch.equal(values, s.gather(1, ids.long()))


def test_a_dropped_expert_gets_its_gradient_and_others_get_none():
    s = scores().requires_grad_()
    ids = s.detach().topk(E, dim=1).indices[:, -K:]  # the experts that live top-k drops
    values, _ = replayed_topk(s, ids)
    values.softmax(dim=1)[:, 0].sum().backward()
    mask = torch.zeros(T, E).scatter(1, ids, 1).bool()
    assert s.grad[mask].abs().min() > 0
    assert s.grad[~mask].abs().max() == 0


def test_with_gradients_the_order_is_that_of_live_topk():
    s = scores().requires_grad_()
    values, indices = live(s)()
    shuffled = indices[:, torch.tensor([2, 0, 1])]
    replayed = replayed_topk(s, shuffled)
    assert torch.equal(replayed[0], values)
    assert torch.equal(replayed[1], indices)


def test_recording_then_replaying_is_the_same_choice():
    s = scores()
    with recording() as microbatch:
        first = chosen(microbatch, s)
    other = scores(5)
    assert torch.equal(chosen(microbatch, other), first)
    assert not torch.equal(other.topk(K, dim=1).indices.sort(dim=1).values, first)


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
    for mask in (right.int(), right.numpy(), right[:, None]):
        with pytest.raises(ReplayError, match=f"{name} is .*; expected a bool tensor"):
            MicrobatchRoutes({1: some_routes()}, **others | {name: mask})
    chosen(MicrobatchRoutes({1: some_routes()}, **others | {name: right}), scores())


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
    microbatch = MicrobatchRoutes({1: ids}, live_T=live_T, counted_T=everything_T)
    chosen(microbatch, s)
    assert microbatch.mismatched[1].item() == T - 1


def test_mismatch_counts_sets_of_counted_tokens_once():
    s = scores()
    ids = s.topk(K, dim=1).indices.flip(1)  # the live sets, in another order
    ids[2] = torch.topk(s[2], K, largest=False).indices
    ids[3] = torch.topk(s[3], K, largest=False).indices
    counted = torch.tensor([True, True, True, False, True, True])
    microbatch = MicrobatchRoutes({1: ids}, counted_T=counted)
    for _ in range(2):
        chosen(microbatch, s)
    assert microbatch.mismatched[1].item() == 1
    assert microbatch.mismatched_T.tolist() == [False, False, True, False, False, False]


def test_watched_tokens_are_counted_beside_the_counted_ones():
    s = scores()
    right, wrong = s.topk(K, dim=1).indices, s.topk(K, dim=1, largest=False).indices
    counted = torch.tensor([False, False, True, True, True, False])
    watched = torch.tensor([True, True, True, True, True, False])
    bad = {1: [0, 2, 5], 2: [0, 3, 5]}
    ids = {layer: right.clone() for layer in bad}
    for layer, at in bad.items():
        ids[layer][at] = wrong[at]
    microbatch = MicrobatchRoutes(ids, counted_T=counted, watched_T=watched)
    for layer in (1, 2, 1, 2):  # the second time is a recompute
        chosen(microbatch, s, layer)
    assert {layer: int(n) for layer, n in microbatch.mismatched.items()} == {1: 1, 2: 1}
    assert {layer: int(n) for layer, n in microbatch.mismatched_watched.items()} == {1: 2, 2: 2}
    assert microbatch.mismatches_T.tolist() == [2, 0, 1, 1, 0, 0]
    assert microbatch.mismatched_T.tolist() == [False, False, True, True, False, False]
    # a gate that compares by itself gets the wider mask, and says what differs
    gate = MicrobatchRoutes(ids, counted_T=counted, watched_T=watched)
    for layer, at in bad.items():
        taken, _, compared = gate.begin_layer(layer, s, K)
        differs = torch.zeros(T, dtype=torch.bool)
        differs[at] = True
        gate.end_layer(layer, taken, differs & compared)
        assert gate.begin_layer(layer, s, K)[2] is None
    assert gate.mismatches_T.tolist() == microbatch.mismatches_T.tolist()
    assert gate.mismatched == microbatch.mismatched
    assert gate.fresh().watched_T is watched
    assert gate.fresh().mismatches_T is None


def test_observing_stays_live():
    ids, s = some_routes(), scores()
    microbatch = MicrobatchRoutes({1: ids}, counted_T=torch.ones(T).bool(), mode=Mode.OBSERVE)
    assert torch.equal(chosen(microbatch, s), s.topk(K, dim=1).indices.sort(dim=1).values)
    assert microbatch.mismatched[1] > 0


def test_bound_functions_see_their_own_microbatch_in_any_order_and_thread():
    microbatches = [MicrobatchRoutes({1: some_routes()}) for _ in range(3)]
    bound = []
    for microbatch in microbatches:
        with replaying(microbatch):
            bound.append(bind_to_microbatch(active_microbatch))
    bound_live = bind_to_microbatch(active_microbatch)
    seen = {}
    with replaying(MicrobatchRoutes({1: some_routes()})) as other:
        chosen(other, scores())
        for index in (2, 0, 1, 0):
            thread = threading.Thread(target=lambda i=index: seen.__setitem__(i, bound[i]()))
            thread.start()
            thread.join()
            assert bound[index]() is microbatches[index]
        assert bound_live() is None
        assert active_microbatch() is other
    assert seen == dict(enumerate(microbatches))


def test_a_bound_function_keeps_what_callers_look_for_in_it():
    mtp_layer = object()

    def run(x):
        return (mtp_layer, x)

    run.mark = "a framework's own"
    with replaying(MicrobatchRoutes({})):  # it runs after the block
        bound = bind_to_microbatch(run)
    assert bound(1) == (mtp_layer, 1)
    assert bound.__closure__[0].cell_contents is mtp_layer
    assert bound.__wrapped__ is run
    assert (bound.__name__, bound.mark) == ("run", "a framework's own")
    assert not hasattr(bound, "another")


def test_routes_are_freed_with_their_last_user_and_not_by_the_collector_of_circles():
    ids = some_routes()
    memory = weakref.ref(ids)
    gc.disable()
    try:
        microbatch = MicrobatchRoutes({1: ids}, live_T=torch.ones(T, dtype=torch.bool))
        del ids
        with replaying(microbatch):
            again = bind_to_microbatch(lambda: chosen(active_microbatch(), scores()))
            first = again()
        kept = weakref.ref(microbatch)
        del microbatch
        assert torch.equal(again(), first)  # a recompute keeps the routes ...
        assert kept() is not None
        del again
        assert kept() is None  # ... and nothing else does
        assert memory() is None
    finally:
        gc.enable()


def test_routes_that_nobody_took_are_an_error_and_an_exception_comes_first():
    given = MicrobatchRoutes({1: some_routes(), 2: some_routes()})
    untaken = r"layers \[1, 2\] were given, and no router took them"
    with pytest.raises(ReplayError, match=untaken), replaying(given):
        pass
    with pytest.raises(KeyError), replaying(given):
        raise KeyError
    assert given.untaken == [1, 2]
    with replaying(given):
        chosen(given, scores())
    assert given.untaken == [2]


def nothing_ran(microbatch):
    """A block without a forward pass."""


def another_model(microbatch):
    torch.nn.Linear(2, 2)(torch.ones(2))


def a_compiled_model(microbatch):
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(2))


def inner(microbatch):
    with replaying(None):
        torch.nn.Linear(2, 2)(torch.ones(2))


@pytest.mark.parametrize(
    ("block", "what"),
    [
        (recording, "nothing was recorded: "),
        (
            lambda: replaying(MicrobatchRoutes({})),
            "there were no routes, and nothing was replayed: ",
        ),
        (
            lambda: replaying(MicrobatchRoutes({1: some_routes()})),
            "the routes of layers [1] were given, and no router took them: ",
        ),
        (
            lambda: replaying(MicrobatchRoutes({1: some_routes()}, mode=Mode.OBSERVE)),
            "the routes of layers [1] were given, and no router took them: ",
        ),
    ],
)
@pytest.mark.parametrize(
    ("run", "why"),
    [
        (nothing_ran, "no forward pass ran inside the block; call the model there"),
        (another_model, "what ran inside the block (Linear) is no Megatron model"),
        (a_compiled_model, "what ran inside the block (OptimizedModule) is no Megatron model"),
        (inner, "the forward pass ran in another replaying or recording block inside of this one"),
    ],
)
def test_a_block_in_which_nothing_happens_says_why(block, what, run, why):
    with pytest.raises(ReplayError, match=re.escape(what + why)), block() as microbatch:
        run(microbatch)
    with pytest.raises(KeyError), block():  # an exception of the block comes first
        raise KeyError
    with recording() as old:  # controls: something is recorded, and replayed
        chosen(old, scores())
    with recording() as again, replaying(again):  # one object in both blocks
        chosen(again, scores())
    with replaying(old):
        chosen(old, scores(3))
    assert torch.equal(old.ids[1], again.ids[1])


class Layers(torch.nn.Module):
    """What torch.compile compiles: of a class of its own, torch leaves its own classes alone."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, given):
        return self.second(self.first(given))


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_modules_run_their_graphs_in_a_block(in_place):
    runs = []

    def backend(graph, _):
        return lambda *given: (runs.append(1), graph.forward(*given))[1]

    torch.compiler.reset()
    layers = Layers()
    of_megatron = type("GPTModel", (torch.nn.Sequential,), {"__module__": "megatron.core.models"})
    model = of_megatron(OrderedDict(layers=layers))
    if in_place:  # as torch recommends it for layers
        layers.compile(backend=backend)
    else:
        model.layers = torch.compile(layers, backend=backend)
    for block in (recording, lambda: replaying(None), contextlib.nullcontext):
        with contextlib.suppress(ReplayError), block():
            model(torch.ones(2))
    assert len(runs) == 3
    torch.compiler.reset()


def test_a_recording_that_only_builds_what_runs_later_is_an_error():
    with pytest.raises(ReplayError, match=r"recording\(\) ended before a layer ran"), recording():
        bind_to_microbatch(lambda: None)
    with replaying(MicrobatchRoutes({}, mode=Mode.RECORD)) as kept:
        node = bind_to_microbatch(lambda: chosen(active_microbatch(), scores()))
    first = node()
    kept.stop_recording()
    assert torch.equal(chosen(kept, scores(5)), first)


def test_a_block_keeps_no_model_and_leaves_no_hook():
    model = torch.nn.Linear(2, 2)
    gone = weakref.ref(model)
    with contextlib.suppress(ReplayError), recording():
        model(torch.ones(2))
    del model
    assert gone() is None
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_a_block_that_only_builds_what_runs_later_is_looked_at_by_its_caller():
    given = MicrobatchRoutes({1: some_routes()})
    with replaying(given):
        node = bind_to_microbatch(lambda: chosen(active_microbatch(), scores()))
    assert given.untaken == [1]
    node()
    assert given.untaken == []
    with pytest.raises(ReplayError, match="no router took them"), replaying(given.fresh()):
        bind_to_microbatch(lambda: None)()  # what was bound has run, and asked for nothing


def test_wrong_ids_name_layer_and_token():
    ids = {1: some_routes(), 4: some_routes()}
    ids[4][3] = ids[4][3, 0]
    with pytest.raises(ReplayError, match=r"layer 4, token 3: ids .* distinct experts from 0 to 7"):
        chosen(MicrobatchRoutes(ids), scores())
    chosen(MicrobatchRoutes({1: ids[1]}), scores())
    with pytest.raises(ReplayError, match="integers"):
        chosen(MicrobatchRoutes({1: ids[1].float()}), scores())
    with pytest.raises(ReplayError, match="routes of other shapes"):
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
