"""The README's commands on one's own tree."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def make(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", *words],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )


def contents(tree: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in tree.rglob("*") if path.is_file())
    return {str(p.relative_to(tree)): (p.read_bytes(), p.stat().st_mode) for p in files}


def test_apply_status_revert(megatron_tree: Path, tmp_path: Path) -> None:
    tree = tmp_path / "my tree"
    shutil.copytree(megatron_tree, tree, ignore=shutil.ignore_patterns("__pycache__"))
    where = f"MEGATRON={tree}"
    before = contents(tree)
    assert make("apply", where).returncode == 0
    assert "moe_router_replay" in (tree / "megatron/core/transformer/moe/router.py").read_text()
    status = make("status", where)
    assert status.returncode == 0
    assert status.stdout.startswith("applied")
    again = make("apply", where)
    assert again.returncode == 0
    assert "already" in again.stdout
    assert make("revert", where).returncode == 0
    assert contents(tree) == before


def test_fidelity_of_one_case() -> None:
    done = make("fidelity", "ONLY=PP4, both")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((ROOT / "build" / "fidelity-only.json").read_text())
    assert (row["world_size"], row["moe_layers"], row["dispatched_as_recorded"]) == (4, 6, 1.0)
    assert row["loss_matches"]
    assert row["grads_match"]
    assert row["controls"] == dict.fromkeys(("shift_token", "swap_layers", "swap_rollouts"), True)


def test_fidelity_of_what_is_no_megatron(tmp_path: Path) -> None:
    refused = make("fidelity", f"MEGATRON={tmp_path}")
    assert refused.returncode == 2
    assert f"error: {tmp_path}: not a git checkout of Megatron-LM" in refused.stderr
    assert "Traceback" not in refused.stderr
