"""verl's own code loads the adapter, in the driver and on an unpatched tree too."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import redirect_stdout
from importlib.metadata import entry_points
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ADAPTER = "megatron_r3.frameworks.verl"


def refusal(what: Any) -> str:
    from megatron_r3.replay.active import ReplayError

    try:
        what()
    except ReplayError as error:
        return str(error)
    return "not refused"


def loaded_by_verl(rank: int, path: str, setting: dict[str, str]) -> dict[str, Any]:
    os.environ.update(setting)
    sys.path[:0] = path.split(os.pathsep)
    from verl.workers.engine.megatron import transformer_impl

    function = transformer_impl.apply_router_replay_patch
    with redirect_stdout(StringIO()) as said:
        told = refusal(function)
    ours = hasattr(function, "__wrapped__")
    assert ("router replay by megatron-r3, not by verl" in said.getvalue()) == (
        ours and told == "not refused"
    )
    return {"ours": ours, "told": told}


@pytest.mark.parametrize("version", ["0.8.0", "0.9.0", "0.9.1"])
def test_verl_loads_the_adapter_itself(patched, verl_path, version):
    """By the setting, and without the setting not, though the package is installed here."""
    assert not [one for one in entry_points(group="verl.plugins") if "megatron_r3" in one.value]
    for setting in ({}, {"VERL_USE_EXTERNAL_MODULES": ADAPTER}):
        given = (verl_path[version], setting)
        (result,) = patched.run(loaded_by_verl, 1, *given, timeout_s=180)
        assert result == {"ours": bool(setting), "told": "not refused"}


def test_on_an_unpatched_tree_the_engine_says_so(unpatched, verl_path):
    setting = {"VERL_USE_EXTERNAL_MODULES": ADAPTER}
    (result,) = unpatched.run(loaded_by_verl, 1, verl_path["0.9.1"], setting, timeout_s=180)
    assert "is not patched; run `megatron-r3 apply " in result["told"]


@pytest.mark.parametrize("version", ["0.8.0", "0.9.0", "0.9.1"])
def test_verls_driver_needs_no_megatron(verl_path: dict[str, str], version: str) -> None:
    code = "import sys, verl; print(sorted(n for n in sys.modules if n.startswith('megatron')))"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), verl_path[version]]),
        "VERL_USE_EXTERNAL_MODULES": ADAPTER,
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "megatron_r3.frameworks.verl" in done.stdout
    assert "megatron.core" not in done.stdout
