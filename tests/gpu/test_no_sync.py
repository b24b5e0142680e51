"""The router's part of a replay never makes the host wait: on a CUDA device, and as counted on CPU.

The tree is the tests' own, or with `--patched-tree DIR` the one in DIR, as on a GPU machine without
a network. Where there is neither, the test is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_r3.patching.git import PatchingError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def waits(request: pytest.FixtureRequest) -> dict[str, int]:
    try:
        tree = request.getfixturevalue("patched_tree")
    except (PatchingError, OSError) as error:
        pytest.skip(f"no tree of Megatron-LM here: {error}")
    path = [str(tree), str(ROOT), str(ROOT / "tests" / "functional")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("router_passes.py"))]
    run = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_a_replayed_router_does_not_wait(waits: dict[str, int]) -> None:
    assert waits["checked"] == 0


def test_the_check_can_fail(waits: dict[str, int]) -> None:
    """Ids that nobody has checked are looked at, which takes a wait."""
    assert waits["not"] >= 1
