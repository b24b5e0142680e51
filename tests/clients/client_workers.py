"""Where a framework's code comes from, and a worker that has it on its path."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from proof.fidelity.rig.worker import TreeWorker

HERE = Path(__file__).parent
# frameworks that are not on PyPI: the variable of make that names a clone, repository and commit
PINS = {
    "SKYRL": ("NovaSky-AI/SkyRL", "a9564572eb8e91076be43c1bd5e4615e3de17265"),
    "NEMO_RL": ("NVIDIA-NeMo/RL", "7ea279abfbeb698b092856d0dab61e7cf39bc909"),
    "BRIDGE": ("NVIDIA-NeMo/Megatron-Bridge", "51885cf132b2814188b6855c25a8588254274c2a"),  # v0.6.0
}


def from_clone(name: str, paths: list[str], out: Path) -> Path:
    """Write paths of the pinned commit of a clone into `out`, and return `out`.

    Args:
        name: a key of PINS; its variable says where the clone is; without it the test is skipped.
        paths: files or folders of the repository.
    """
    clone, (repository, commit) = os.environ.get(name), PINS[name]
    if not clone:
        pytest.skip(f"needs a clone of {repository}: make clients {name}=CLONE")
    archive = subprocess.run(
        ["git", "-C", clone, "archive", commit, *paths], capture_output=True, check=False
    )
    if archive.returncode:
        said = archive.stderr.decode(errors="replace").strip()
        pytest.fail(f"{name}={clone}: no {', '.join(paths)} of {repository} at {commit}: {said}")
    subprocess.run(["tar", "-x", "-C", str(out)], input=archive.stdout, check=True)
    return out


def worker_with(tree: Path, folders: list[Path], preload: str, **env: str) -> TreeWorker:
    """A worker that has imported a module, with these folders and those of the tests on its path.

    Args:
        env: more environment variables.
    """
    path = [*folders, HERE, HERE.parent / "functional"]
    env["PYTHONPATH"] = os.pathsep.join(map(str, path))
    return TreeWorker(tree, ("megatron.training", "pytest", preload), env)
