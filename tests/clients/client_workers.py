"""Where a framework's code comes from, and a worker that has it on its path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from proof.fidelity.clients.sources import PINS, take_from_clone
from proof.fidelity.rig.worker import TreeWorker

HERE = Path(__file__).parent


def from_clone(name: str, paths: list[str], out: Path) -> Path:
    """Write paths of the pinned commit of a clone into `out`, and return `out`.

    Args:
        name: a key of PINS; its variable says where the clone is; without it the test is skipped.
        paths: files or folders of the repository.
    """
    clone = os.environ.get(name)
    if not clone:
        pytest.skip(f"needs a clone of {PINS[name][0]}: make clients {name}=CLONE")
    try:
        return take_from_clone(name, clone, paths, out)
    except ValueError as error:
        pytest.fail(str(error))


def worker_with(tree: Path, folders: list[Path], preload: str, **env: str) -> TreeWorker:
    """A worker that has imported a module, with these folders and those of the tests on its path.

    Args:
        env: more environment variables.
    """
    path = [*folders, HERE, HERE.parent / "functional"]
    env["PYTHONPATH"] = os.pathsep.join(map(str, path))
    return TreeWorker(tree, ("megatron.training", "pytest", preload), env)
