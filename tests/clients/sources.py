"""Frameworks that are not on PyPI: files of a clone at the pinned commit, or a test is skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fidelity.clients.sources import PINS, take_from_clone


def from_clone(name: str, paths: list[str], out: Path) -> Path:
    """Write paths of the pinned commit of a clone into `out`.

    Args:
        name: a key of PINS; its variable says where the clone is; without it the test is skipped.
        paths: files or folders of the repository.

    Returns:
        `out`.
    """
    clone = os.environ.get(name)
    if not clone:
        pytest.skip(f"needs a clone of {PINS[name][0]}: make clients {name}=CLONE")
    try:
        return take_from_clone(name, clone, paths, out)
    except ValueError as error:
        pytest.fail(str(error))
