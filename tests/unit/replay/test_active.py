"""The active microbatch: scoped, bound, and never guessed.

Shape suffixes (docs/glossary.md): T.
"""

import contextlib
import gc
import re
import threading
import weakref
from collections import OrderedDict

import pytest
import torch
from some_routes import E, K, T, chosen, live, scores, some_routes

from megatron_r3.replay.active import (
    MicrobatchRoutes,
    Mode,
    ReplayError,
    active_microbatch,
    bind_to_microbatch,
    recording,
    replaying,
)
from megatron_r3.replay.gate.reference import replayed_topk


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
