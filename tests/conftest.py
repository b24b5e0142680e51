"""Megatron trees for the tests: unpatched and patched copies of the one in build/."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fidelity.rig.worker import TreeWorker
from fidelity.trees import patched_copy, unpatched_copy


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--megatron",
        type=Path,
        help="a git tree of Megatron-LM whose commit is tested, instead of the default one",
    )


@pytest.fixture(scope="session")
def megatron_tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpatched tree of its own: what is committed in build/, or at --megatron."""
    copy = tmp_path_factory.mktemp("trees") / "unpatched"
    unpatched_copy(request.config.getoption("--megatron"), copy)
    return copy


@pytest.fixture(scope="session")
def patched_tree(megatron_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A patched tree of its own."""
    return patched_copy(megatron_tree, tmp_path_factory.mktemp("trees") / "patched")


@pytest.fixture(scope="session")
def patched(patched_tree: Path) -> Iterator[TreeWorker]:
    """Runs cases on the patched tree."""
    with TreeWorker(patched_tree, preload=["megatron.training"]) as worker:
        yield worker


@pytest.fixture(scope="session")
def unpatched(megatron_tree: Path) -> Iterator[TreeWorker]:
    """Runs cases on the unpatched tree."""
    with TreeWorker(megatron_tree, preload=["megatron.training"]) as worker:
        yield worker
