"""Megatron trees for the tests: unpatched and patched copies of the one in build/."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from once import Once
from slow import SLOW

from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.trees import patched_copy, unpatched_copy

# What every rank needs, imported once before the ranks are forked. The modules of the tests, which
# the ranks import, import pytest.
PRELOAD = (
    "megatron.training",
    "pytest",
    "demo.pretrain",
    "proof.fidelity.update",
    "megatron_r3.cli",
)


def pytest_configure() -> None:
    """Hear the signals that tests send: `nohup`, or a shell's &, has them ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs come first: at the end one that waits for processes would leave a core idle."""
    items.sort(key=lambda item: not _is_in_slow_file(item))
    for item in items:
        if _is_in_slow_file(item):
            item.add_marker("slow")


def _is_in_slow_file(item: pytest.Item) -> bool:
    return item.path.relative_to(Path(__file__).parent).as_posix().startswith(SLOW)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--megatron",
        type=Path,
        help="a git tree of Megatron-LM whose commit is tested, instead of the default one",
    )
    parser.addoption(
        "--patched-tree",
        type=Path,
        help="a patched tree that tests of a patched tree run on as it is; nothing is fetched",
    )


@pytest.fixture(scope="session")
def once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Makes folders that are shared by all workers of the session (tests/support/once.py)."""
    folder = tmp_path_factory.getbasetemp()
    # Each worker of pytest-xdist has a folder of its own inside the one of the session.
    return Once(folder.parent if hasattr(request.config, "workerinput") else folder)


@pytest.fixture(scope="session")
def trees(request: pytest.FixtureRequest, once: Once) -> Path:
    """The folder of both trees: what is committed in build/, or at --megatron, and it patched."""

    def make(folder: Path) -> None:
        # Both at once: a worker that already imports from a tree writes .pyc files into it, which
        # come and go while another copies the tree.
        unpatched_copy(request.config.getoption("--megatron"), folder / "unpatched")
        patched_copy(folder / "unpatched", folder / "patched")

    return once("trees", make)


@pytest.fixture(scope="session")
def megatron_tree(trees: Path) -> Path:
    """An unpatched tree. All tests share it: copy it before changing it, without __pycache__."""
    return trees / "unpatched"


@pytest.fixture(scope="session")
def patched_tree(request: pytest.FixtureRequest) -> Path:
    """A patched tree. All tests share it: copy it before changing it, without __pycache__."""
    named = request.config.getoption("--patched-tree")
    if named is None:
        return request.getfixturevalue("trees") / "patched"
    if not (named / "megatron" / "core").is_dir():
        pytest.exit(f"--patched-tree {named}: no tree of Megatron-LM", returncode=2)
    return named


@pytest.fixture(scope="session")
def patched(patched_tree: Path) -> Iterator[TreeWorker]:
    """Runs cases on the patched tree."""
    with TreeWorker(patched_tree, PRELOAD) as worker:
        yield worker


@pytest.fixture(scope="session")
def unpatched(megatron_tree: Path) -> Iterator[TreeWorker]:
    """Runs cases on the unpatched tree."""
    with TreeWorker(megatron_tree, PRELOAD) as worker:
        yield worker
