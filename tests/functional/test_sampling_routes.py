"""Megatron's own inference engine: every token that it sampled has the experts that it took.

Shape suffixes (docs/glossary.md): G, K, L, N, T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from training import Policy

from demo.model import arguments
from proof.fidelity import sampling
from proof.fidelity.rig.rank_process import RankError
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.sampling import RECORD, Sampled

ONE = ["--micro-batch-size", "1", "--moe-router-load-balancing-type", "none"]
LAYOUT = (  # TP2 with SP, EP2, PP2
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
    f"--pipeline-model-parallel-size 2 {sampling.EP2}"
)
# Options of the engine, and what shows that they did something. The memory of the last one does not
# hold the requests that run at a time.
OPTIONS: dict[str, tuple[dict[str, Any], Callable[[Sampled], bool]]] = {
    "chunked prefill": (
        {"enable_chunked_prefill": True, "max_tokens": 64},
        lambda one: one.was_chunked,
    ),
    "prefix caching": ({"enable_prefix_caching": True}, lambda one: one.cached > 0),
    "evictions": (
        {"buffer_size_gb": 0.0006, "paused_buffer_size_gb": 0.0},
        lambda one: one.evictions > 0,
    ),
}


def argv(policy: Policy, *more: str) -> list[str]:
    return arguments(ONE, ["--load", str(policy.checkpoint)], list(more))


def sample(
    worker: TreeWorker, policy: Policy, *more: str, ranks: int = 1, **options: Any
) -> list[list[Sampled]]:
    return worker.run(sampling.sample, ranks, argv(policy, *more), timeout_s=240, **options)


@pytest.fixture(scope="module")
def plain(patched: TreeWorker, policy: Policy) -> list[Sampled]:
    """One process, no option of the engine."""
    (samples,) = sample(patched, policy, RECORD)
    return samples


def without_routes(samples: Sequence[Sampled]) -> list[int]:
    return [number for number, one in enumerate(samples) if one.ids_TLK is None]


def assert_same(samples: Sequence[Sampled], plain: Sequence[Sampled]) -> None:
    for one, other in zip(samples, plain, strict=True):
        assert one.tokens_N == other.tokens_N
        assert one.ids_TLK is not None
        assert other.ids_TLK is not None
        assert sampling.same_experts(one.ids_TLK, other.ids_TLK) == 1


def test_every_request_has_the_experts_of_every_token(plain: list[Sampled]) -> None:
    assert len(plain) == sampling.NUM_REQUESTS
    assert without_routes(plain) == []
    for one in plain:
        assert one.ids_TLK is not None
        assert one.ids_TLK.shape == (len(one.tokens_N) - 1, 4, 4)


def test_unpatched_some_requests_have_none(unpatched: TreeWorker, policy: Policy) -> None:
    """The control: a request's blocks were another's before the engine had read their routes."""
    (samples,) = sample(unpatched, policy, RECORD)
    assert 0 < len(without_routes(samples)) < sampling.NUM_REQUESTS
    (samples,) = sample(unpatched, policy, RECORD, second=True)
    assert len(without_routes(samples)) == sampling.NUM_REQUESTS


def test_off_tokens_and_logprobs_are_those_of_the_unpatched_tree(patched, unpatched, policy, plain):
    (off,), (upstream,) = (sample(worker, policy) for worker in (patched, unpatched))
    assert off == upstream  # no request has routes
    for one, other in zip(off, plain, strict=True):
        assert (one.tokens_N, one.logprobs_G) == (other.tokens_N, other.logprobs_G)


def test_the_training_forward_chooses_the_same_experts(patched, policy, plain):
    both = argv(policy, RECORD, "--moe-router-replay")
    (chosen,) = patched.run(sampling.in_training, 1, both, plain, timeout_s=240)
    for one, (ids_TLK, logprobs_G) in zip(plain, chosen, strict=True):
        assert one.ids_TLK is not None
        assert sampling.same_experts(one.ids_TLK, ids_TLK) == 1
        assert np.abs(logprobs_G - one.logprobs_G).max() < 1e-4
    # the control: the experts of the token before
    shifted = np.roll(chosen[0][0], 1, axis=0)
    assert plain[0].ids_TLK is not None
    assert sampling.same_experts(plain[0].ids_TLK, shifted) < 0.9


def test_beside_replay_and_another_model_the_engine_records_too(patched, policy, plain):
    (samples,) = sample(patched, policy, RECORD, "--moe-router-replay", second=True)
    assert_same(samples, plain)


def test_four_ranks_record_what_one_process_records(patched, policy, plain):
    for samples in sample(patched, policy, RECORD, *LAYOUT.split(), ranks=4):
        assert_same(samples, plain)


@pytest.fixture(scope="module")
def whole(patched: TreeWorker, policy: Policy) -> list[Sampled]:
    """Requests that begin alike, without an option of the engine."""
    (samples,) = sample(patched, policy, RECORD, shared=20)
    return samples


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_the_engine_lose_no_experts(patched, policy, whole, option):
    settings, has_come = OPTIONS[option]
    (samples,) = sample(patched, policy, RECORD, settings=settings, shared=20)
    assert_same(samples, whole)
    assert any(map(has_come, samples))
    assert not any(map(has_come, whole))


def test_a_suspended_engine_goes_on(patched, policy, plain):
    settings = {"kv_cache_management_mode": "recompute"}
    (samples,) = sample(patched, policy, RECORD, settings=settings, suspend_at=12)
    assert any(one.stopped_at for one in samples)
    assert_same(samples, plain)


def test_tokens_keep_the_experts_with_which_they_were_sampled(patched, policy, plain):
    """The weights change while the engine is suspended, as they do between two updates."""
    (samples,) = sample(
        patched,
        policy,
        RECORD,
        settings={"kv_cache_management_mode": "recompute"},
        suspend_at=12,
        new_weights=True,
    )
    stopped = [(a, b) for a, b in zip(samples, plain, strict=True) if a.stopped_at]
    assert len(stopped) > 4
    for one, other in stopped:
        assert one.ids_TLK is not None
        assert other.ids_TLK is not None
        sampled = one.stopped_at - 1  # nobody had computed the last token yet
        assert one.tokens_N[: one.stopped_at] == other.tokens_N[: one.stopped_at]
        assert sampling.same_experts(one.ids_TLK[:sampled], other.ids_TLK[:sampled]) == 1
        # the control: the token after them was computed with other weights
        assert sampling.same_experts(one.ids_TLK[sampled:][:1], other.ids_TLK[sampled:][:1]) < 1


# arguments, fields of the config that are set once the model is made, and the reason
NOT_RECORDED: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "fused": ([RECORD], {"moe_router_fusion": True}, " needs moe_router_fusion to be off"),
    "late": (
        [],
        {"moe_enable_routing_replay": True},
        ": no router of this model records; set the option in its config before the model is made",
    ),
    "sinkhorn": (
        [RECORD, "--moe-router-load-balancing-type", "sinkhorn"],
        {},
        ": a router recorded nothing, because it does not choose by top-k",
    ),
}


@pytest.mark.parametrize("name", NOT_RECORDED)
def test_what_records_nothing_is_refused(patched: TreeWorker, policy: Policy, name: str) -> None:
    arguments, config, reason = NOT_RECORDED[name]
    with pytest.raises(RankError, match=f"moe_enable_routing_replay{reason}"):
        sample(patched, policy, *arguments, config=config)
