"""ms-swift's own GRPO trainer, unchanged, replays through megatron_r3.

Shape suffixes (docs/glossary.md): E, T.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from framework_cases import CASES, LAYOUTS, Data
from router_replay_client import Passes, by_itself, check, check_off, framework, step_dropped_in

from proof.fidelity.rig.worker import TreeWorker


# With context parallelism ms-swift's template pads each sample; there is no template here.
@pytest.mark.parametrize("case", [name for name in CASES if "CP2" not in name])
def test_ms_swift_replays(ms_swift: TreeWorker, case: str) -> None:
    check(ms_swift, "ms_swift", case)


@pytest.mark.parametrize("case", ["1", "full", "EP2", "PP2 full"])
def test_without_the_import_ms_swift_is_as_on_the_unpatched_tree(
    ms_swift: TreeWorker, ms_swift_unpatched: TreeWorker, case: str
) -> None:
    check_off(ms_swift, ms_swift_unpatched, "ms_swift", case)


# -- what upstream's class does not do


def attempt(rank: int, case_name: str) -> str:
    try:
        by_itself(rank, "ms_swift", CASES[case_name])
    except AttributeError as error:
        return str(error)
    return "no error"


def test_with_upstreams_class_ms_swift_ends_with_mtp(ms_swift: TreeWorker) -> None:
    """The control of the case MTP: its router is in the list, and has no targets."""
    (told,) = ms_swift.run(attempt, 1, "MTP")
    assert "'NoneType' object has no attribute" in told


def test_with_upstreams_class_a_last_token_goes_to_one_expert(ms_swift: TreeWorker) -> None:
    """The control of the case missing: ms-swift's zeros are a route there."""
    (theirs,) = ms_swift.run(only_missing, 1, "missing")
    assert theirs.experts() == {1, 2}


def only_missing(rank: int, case_name: str) -> Passes:
    client = framework("ms_swift")(CASES[case_name])
    return client.run(client.without_some(client.data.routes))


# -- ms-swift's own order of tokens


def test_without_padding_free_ms_swift_replays_the_routes_of_other_tokens(ms_swift):
    """ms-swift's own, pinned here: with upstream's class and with the import alike.

    Without `padding_free` a micro-batch is [B, S]; `set_router_replay_data` flattens its routes
    sample by sample, and Megatron's routers see it token by token.
    """
    given = ("ms_swift", CASES["full"])
    for what in (step_dropped_in, by_itself):
        (passes,) = ms_swift.run(what, 1, *given, padding_free=False)
        assert len(passes.maps) == 24
        assert passes.wrong(Data().routes) == 24


# -- R2


def recorded(rank: int, case_name: str) -> dict[str, Any]:
    """R2 replays what ms-swift's log-prob pass recorded; other experts would show."""
    import megatron_r3.frameworks.router_replay  # noqa: F401

    made = framework("ms_swift")
    made.mode = "R2"  # type: ignore[attr-defined]
    client = made(CASES[case_name])
    step = client.run(None)
    give = client.microbatches  # type: ignore[attr-defined]

    def others(routes: Any) -> Any:
        return [{**one, "routed_experts": (one["routed_experts"] + 1) % 8} for one in give(routes)]

    client.microbatches = others  # type: ignore[attr-defined]
    return {"step": step, "others": client.run(None)}


def live(rank: int, case_name: str) -> Passes:
    client = framework("ms_swift")(CASES[case_name], replays=False)
    return client.run(None)


@pytest.mark.parametrize("case", ["full", "TP2 SP", "EP2", "PP2 full", "MTP"])
def test_what_ms_swift_recorded_replays_to_the_bit(ms_swift: TreeWorker, case: str) -> None:
    number = LAYOUTS[CASES[case].layout][0]
    ranks, want = (ms_swift.run(what, number, case, timeout_s=120) for what in (recorded, live))
    for result, alone in zip(ranks, want, strict=True):
        assert result["step"].same(alone)
        assert not result["others"].same(alone)
        for one, other in zip(result["step"].maps, alone.maps, strict=True):
            assert torch.equal(one.map_TE, other.map_TE)
