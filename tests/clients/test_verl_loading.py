"""verl's own code loads the adapter, in the driver and on an unpatched tree too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from fidelity.rig.worker import TreeWorker

ROOT = Path(__file__).parents[2]
ADAPTER = "megatron_r3.integrations.verl"


def refusal(what: Any) -> str:
    from megatron_r3.replay import ReplayError

    try:
        what()
    except ReplayError as error:
        return str(error)
    return "not refused"


def loaded_by_verl(rank: int, path: str, setting: dict[str, str]) -> dict[str, Any]:
    os.environ.pop("VERL_USE_EXTERNAL_PLUGINS", None)
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
def test_verl_loads_the_adapter_itself(
    patched: TreeWorker, verl_path: dict[str, str], tmp_path: Path, version: str
) -> None:
    """By VERL_USE_EXTERNAL_MODULES, and from 0.9 on by the entry point of an installed package."""
    table = (ROOT / "pyproject.toml").read_text().partition('entry-points."verl.plugins"]\n')[2]
    (name, module) = re.findall(r'^(\w+) = "([\w.]+)"$', table, re.MULTILINE)[0]
    metadata = tmp_path / "installed-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[verl.plugins]\n{name} = {module}\n")
    path = verl_path[version]
    with_package = os.pathsep.join([path, str(tmp_path)])
    ways: dict[str, tuple[str, dict[str, str]]] = {
        "nothing": (path, {"VERL_USE_EXTERNAL_PLUGINS": "none"}),
        "setting": (path, {"VERL_USE_EXTERNAL_MODULES": ADAPTER}),
        "entry point": (with_package, {}),
        "entry points off": (with_package, {"VERL_USE_EXTERNAL_PLUGINS": "none"}),
    }
    found = {
        way: patched.run(loaded_by_verl, 1, *given, timeout_s=180)[0] for way, given in ways.items()
    }
    assert [way for way, result in found.items() if result["ours"]] == (
        ["setting"] if version == "0.8.0" else ["setting", "entry point"]
    )
    assert {result["told"] for result in found.values()} == {"not refused"}


def test_on_an_unpatched_tree_the_engine_says_so(
    unpatched: TreeWorker, verl_path: dict[str, str]
) -> None:
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
    assert "megatron_r3.integrations.verl" in done.stdout
    assert "megatron.core" not in done.stdout
