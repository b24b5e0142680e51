"""Clients from PyPI, installed by `make clients` in folders of their own; skipped without them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fidelity.rig.worker import TreeWorker

ENGINE = "verl.workers.engine.megatron.transformer_impl"
VERSIONS = ("0.8.0", "0.9.0", "0.9.1")


@pytest.fixture(scope="session")
def clients() -> Path:
    """The folder of `make clients`."""
    folder = os.environ.get("MEGATRON_R3_CLIENTS")
    if folder is None:
        pytest.skip("needs verl: run `make clients`")
    return Path(folder).resolve()


@pytest.fixture(scope="session")
def verl_path(clients: Path) -> dict[str, str]:
    """What is on the path of a process for each version of verl."""
    here = Path(__file__).parents[1] / "functional"
    return {
        version: os.pathsep.join(map(str, (clients / f"verl-{version}", clients / "site", here)))
        for version in VERSIONS
    }


def _worker(tree: Path, path: str, modules: str) -> Iterator[TreeWorker]:
    """A worker that has imported verl's engine, with verl's own setting for other modules."""
    # The settings are those of this worker alone: another one starts while it still lives.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv("VERL_USE_EXTERNAL_MODULES", modules)
        patch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
        worker = TreeWorker(tree, ("megatron.training", "pytest", ENGINE))
    with worker:
        yield worker


@pytest.fixture(scope="session", params=VERSIONS)
def verl(
    request: pytest.FixtureRequest, patched_tree: Path, verl_path: dict[str, str]
) -> Iterator[TreeWorker]:
    """verl on megatron_r3, by one setting."""
    modules = "megatron_r3.integrations.verl"
    yield from _worker(patched_tree, verl_path[request.param], modules)


@pytest.fixture(scope="session")
def verl_alone(patched_tree: Path, verl_path: dict[str, str]) -> Iterator[TreeWorker]:
    """verl 0.9.1 with its own replay."""
    yield from _worker(patched_tree, verl_path["0.9.1"], "")
