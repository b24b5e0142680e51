"""Clients, from PyPI in folders of their own, or from a clone; skipped without them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from sources import from_clone

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


def _framework(tree: Path, name: str, folders: list[Path]) -> Iterator[TreeWorker]:
    """A worker that has imported NAME_client.py, with these folders on its path."""
    here = Path(__file__).parent
    path = [*folders, here, here.parent / "functional"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, path)))
        worker = TreeWorker(tree, ("megatron.training", "pytest", f"{name}_client"))
    with worker:
        yield worker


@pytest.fixture(scope="session")
def skyrl_folders(clients: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    out = tmp_path_factory.mktemp("skyrl")
    from_clone("SKYRL", ["skyrl", "skyrl-gym/skyrl_gym"], out)
    return [out, out / "skyrl-gym", clients / "site"]


@pytest.fixture(scope="session")
def skyrl(patched_tree: Path, skyrl_folders: list[Path]) -> Iterator[TreeWorker]:
    """SkyRL at its pinned commit; each case imports the drop-in, or not."""
    yield from _framework(patched_tree, "skyrl", skyrl_folders)


@pytest.fixture(scope="session")
def skyrl_unpatched(megatron_tree: Path, skyrl_folders: list[Path]) -> Iterator[TreeWorker]:
    yield from _framework(megatron_tree, "skyrl", skyrl_folders)


@pytest.fixture(scope="session")
def nemo_rl_folders(clients: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    out = tmp_path_factory.mktemp("nemo_rl")
    return [from_clone("NEMO_RL", ["nemo_rl"], out), clients / "site"]


@pytest.fixture(scope="session")
def nemo_rl(patched_tree: Path, nemo_rl_folders: list[Path]) -> Iterator[TreeWorker]:
    """NeMo-RL at its pinned commit; each case imports the drop-in, or not."""
    yield from _framework(patched_tree, "nemo_rl", nemo_rl_folders)


@pytest.fixture(scope="session")
def nemo_rl_unpatched(megatron_tree: Path, nemo_rl_folders: list[Path]) -> Iterator[TreeWorker]:
    yield from _framework(megatron_tree, "nemo_rl", nemo_rl_folders)


@pytest.fixture(scope="session")
def ms_swift(patched_tree: Path, clients: Path) -> Iterator[TreeWorker]:
    """ms-swift 4.6.0; each case imports the drop-in, or not."""
    folders = [clients / "ms-swift-4.6.0", clients / "site"]
    yield from _framework(patched_tree, "ms_swift", folders)


@pytest.fixture(scope="session")
def ms_swift_unpatched(megatron_tree: Path, clients: Path) -> Iterator[TreeWorker]:
    folders = [clients / "ms-swift-4.6.0", clients / "site"]
    yield from _framework(megatron_tree, "ms_swift", folders)
