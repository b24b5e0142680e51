"""Megatron's own router tracer sees the routes of the store; with live routing it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from slow import slow_except
from training import changed_store, train

from megatron_r3.data.store import RolloutStore
from proof.fidelity import traced
from proof.fidelity.rollouts import shift_token

LAYOUTS = {
    "EP2": (2, "--expert-model-parallel-size 2"),
    "CP2, packs": (
        2,
        "--context-parallel-size 2 --cp-comm-type all_gather --rollouts-pack "
        "--micro-batch-size 1 --global-batch-size 4 --seq-length 64",
    ),
}


def recorded(store: Path) -> int:
    """The pairs of a token and a layer of a store."""
    read = RolloutStore([store])
    assert read.recorded_share() == 1
    return int(read.column("num_tokens").sum() - len(read)) * len(read.info.moe_layers)


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, "EP2"))
def test_the_tracer_sees_the_routes_of_the_store(patched, policy, tmp_path, layout):
    ranks, options = LAYOUTS[layout]
    argv = policy.arguments(*options.split(), "--moe-routing-trace-path", str(tmp_path / "trace"))
    patched.run(train, ranks, argv, timeout_s=240)
    counts = traced.compare(argv)
    assert (counts.differ, counts.untraced) == (0, 0), counts
    if "packs" not in layout:  # the packs of a step are not all of the store
        assert counts.equal == recorded(policy.store)
    # a fault that changes no count of a layer: the routes of the token before
    shifted = changed_store(policy.store, tmp_path / "shifted", shift_token)
    counts = traced.compare([*argv, "--rollouts", str(shifted)])
    assert counts.differ > counts.equal


def test_live_routing_is_not_that_of_the_store(patched, policy, tmp_path, capsys):
    ep2 = ["--expert-model-parallel-size", "2", "--moe-routing-trace-path", str(tmp_path / "trace")]
    argv = policy.arguments(*ep2)
    argv.remove("--moe-router-replay")
    patched.run(train, 2, argv, timeout_s=240)
    assert traced.main(argv) == 1
    assert "; the first that differs: rank " in capsys.readouterr().out
    counts = traced.compare(argv)
    assert 0 < counts.differ < counts.equal
    assert counts.equal + counts.differ == recorded(policy.store)
    argv += ["--tensor-model-parallel-size", "4"]
    assert traced.main(argv) == 2
    assert "files of 2 ranks" in capsys.readouterr().err
