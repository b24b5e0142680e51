"""Megatron trees for the tests: unpatched and patched copies of the one in build/."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_r3.cpu.worker import TreeWorker
from megatron_r3.patching.apply import apply_series
from megatron_r3.patching.fetch import fetch_tree
from megatron_r3.patching.matrix import patches_folder, read_matrix

ROOT = Path(__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--megatron",
        type=Path,
        help="a git tree of Megatron-LM whose commit is tested, instead of the default one",
    )


@pytest.fixture(scope="session")
def megatron_tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpatched tree of its own: what is committed in build/, or at --megatron."""
    source = request.config.getoption("--megatron")
    if source is None:
        source = fetch_tree(read_matrix(patches_folder()).default, ROOT / "build")
    copy = tmp_path_factory.mktemp("unpatched")
    archive = subprocess.run(
        ["git", "-C", str(source), "archive", "HEAD"], stdout=subprocess.PIPE, check=True
    )
    subprocess.run(["tar", "-x", "-C", str(copy)], input=archive.stdout, check=True)
    return copy


@pytest.fixture(scope="session")
def patched_tree(megatron_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A patched tree of its own."""
    copy = tmp_path_factory.mktemp("patched") / "tree"
    shutil.copytree(megatron_tree, copy)
    apply_series(copy, patches_folder())
    return copy


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
