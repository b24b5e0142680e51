"""Make copies of what is committed in a Megatron tree, unpatched and patched, to run on."""

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
    """Write what is committed in `source` to `target`; return `target`, and the tree's name.

    Args:
        source: a git checkout. None: the default tree in build/.

    Raises:
        PatchingError: `source` is no git checkout of Megatron-LM.
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
    """Make a patched copy of a tree, which may be a commit between releases.

    Such a tree of a user needs UNRELEASED=1 (`make apply`); this copy only serves tests.
    """
    shutil.copytree(unpatched, target)
    apply_series(target, patches_folder(), unreleased=True)
    return target


def has_loop(tree: Path) -> bool:
    """Whether a tree has Megatron's training loop: PyPI's trees up to 0.16 have none."""
    return (tree / "megatron" / "training" / "training.py").exists()
