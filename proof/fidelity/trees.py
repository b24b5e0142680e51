"""Copies of a Megatron tree to run on: what is committed in it, unpatched and patched."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from megatron_r3.patching.apply import apply_series
from megatron_r3.patching.fetch import fetch_tree
from megatron_r3.patching.git import PatchingError
from megatron_r3.patching.versions import patches_folder, read_versions

ROOT = Path(__file__).parents[2]


def unpatched_copy(source: Path | None, target: Path, commit: str = "HEAD") -> tuple[Path, str]:
    """What is committed in `source` (None: the default tree in build/), and what to call it.

    Raises:
        PatchingError: it is no git checkout of Megatron-LM.
    """
    default = read_versions(patches_folder()).default
    if source is None:
        source = fetch_tree(default, ROOT / "build")
    target.mkdir(parents=True)
    git = ["git", "-C", str(source), "archive", commit]
    archive = subprocess.run(git, capture_output=True, check=False)
    if not archive.returncode:
        subprocess.run(["tar", "-x", "-C", str(target)], input=archive.stdout, check=True)
    if archive.returncode or not (target / "megatron" / "core").is_dir():
        why = archive.stderr.decode(errors="replace").strip() or "it has no megatron/core"
        raise PatchingError(f"{source}: not a git checkout of Megatron-LM: {why}")
    return target, source.name


def patched_copy(unpatched: Path, target: Path) -> Path:
    """A copy with the patches in it; the tree may be one between releases.

    The user's own tree needs a word for that. This is a copy, and it is made to be tested.
    """
    shutil.copytree(unpatched, target)
    apply_series(target, patches_folder(), unreleased=True)
    return target


def training_or_core(tree: Path) -> str:
    """The module to import: trees of PyPI have no training loop up to 0.16."""
    whole = (tree / "megatron" / "training" / "training.py").exists()
    return "megatron.training" if whole else "megatron.core.models.gpt"
