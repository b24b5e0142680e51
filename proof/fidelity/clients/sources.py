"""Pinned commits of frameworks that are not on PyPI. Their files are taken from clones."""

from __future__ import annotations

import subprocess
from pathlib import Path

# variable of make: (repository, commit)
PINS = {
    "SKYRL": ("NovaSky-AI/SkyRL", "a9564572eb8e91076be43c1bd5e4615e3de17265"),
    "NEMO_RL": ("NVIDIA-NeMo/RL", "7ea279abfbeb698b092856d0dab61e7cf39bc909"),
    "BRIDGE": ("NVIDIA-NeMo/Megatron-Bridge", "51885cf132b2814188b6855c25a8588254274c2a"),  # v0.6.0
}
# The modules that SkyRL calls to replay. The `__init__.py` files of their packages are left out,
# because they would import an inference server. Python imports the modules from plain folders.
SKYRL_FILES = [
    f"skyrl/backends/skyrl_train/{name}.py"
    for name in (
        "utils/replay_utils",
        "distributed/megatron/token_metadata",
        "distributed/megatron/packing_utils",
    )
]


def take_from_clone(name: str, clone: str, paths: list[str], out: Path) -> Path:
    """Take files of a clone at the commit in `PINS`, write them into `out`, and return `out`.

    Args:
        name: a key of PINS.
        clone: the folder of the clone.
        paths: files or folders of the repository.

    Raises:
        ValueError: the clone has no such commit, or the commit no such path.
    """
    repository, commit = PINS[name]
    archive = subprocess.run(
        ["git", "-C", clone, "archive", commit, *paths], capture_output=True, check=False
    )
    if archive.returncode:
        error = archive.stderr.decode(errors="replace").strip()
        raise ValueError(
            f"{name}={clone}: has no {', '.join(paths)} at commit {commit}; give a clone of "
            f"{repository} that has this commit: {error}"
        )
    subprocess.run(["tar", "-x", "-C", str(out)], input=archive.stdout, check=True)
    return out
