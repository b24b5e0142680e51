"""Frameworks that are not on PyPI: their pinned commits, and files of a clone at such a commit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

# variable of make: (repository, commit)
PINS = {
    "SKYRL": ("NovaSky-AI/SkyRL", "a9564572eb8e91076be43c1bd5e4615e3de17265"),
    "NEMO_RL": ("NVIDIA-NeMo/RL", "7ea279abfbeb698b092856d0dab61e7cf39bc909"),
    "BRIDGE": ("NVIDIA-NeMo/Megatron-Bridge", "51885cf132b2814188b6855c25a8588254274c2a"),  # v0.6.0
}


def from_clone(name: str, paths: list[str], out: Path) -> Path:
    """Write paths of the pinned commit of a clone into `out`.

    Args:
        name: a key of PINS; its variable says where the clone is; without it the test is skipped.
        paths: files or folders of the repository.

    Returns:
        `out`.
    """
    repository, commit = PINS[name]
    clone = os.environ.get(name)
    if not clone:
        pytest.skip(f"needs a clone of {repository}: make clients {name}=CLONE")
    archive = subprocess.run(
        ["git", "-C", clone, "archive", commit, *paths], capture_output=True, check=False
    )
    if archive.returncode:
        said = archive.stderr.decode(errors="replace").strip()
        pytest.fail(f"{name}={clone}: no {', '.join(paths)} at {commit} of {repository}: {said}")
    subprocess.run(["tar", "-x", "-C", str(out)], input=archive.stdout, check=True)
    return out
