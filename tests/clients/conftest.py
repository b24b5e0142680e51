"""Clients, from PyPI in folders of their own, or from a clone; skipped without them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client_workers import from_clone, worker_with

from proof.fidelity.rig.worker import TreeWorker

ENGINE = "verl.workers.engine.megatron.transformer_impl"
VERSIONS = ("0.8.0", "0.9.0", "0.9.1")


@pytest.fixture(scope="session")
def clients() -> Path:
    """The folder of `make clients`."""
    folder = os.environ.get("MEGATRON_R3_CLIENTS")
    if folder is None:
        pytest.skip("needs the packages of frameworks: run `make clients`")
    return Path(folder).resolve()


@pytest.fixture(scope="session")
def verl_path(clients: Path) -> dict[str, str]:
    """What is on the path of a process for each version of verl."""
    return {
        version: os.pathsep.join(map(str, (clients / f"verl-{version}", clients / "site")))
        for version in VERSIONS
    }


def _verl(clients: Path, tree: Path, version: str, modules: str) -> Iterator[TreeWorker]:
    """A worker that has imported verl's engine, with verl's own setting for other modules."""
    folders = [clients / f"verl-{version}", clients / "site"]
    with worker_with(tree, folders, ENGINE, VERL_USE_EXTERNAL_MODULES=modules) as worker:
        yield worker


@pytest.fixture(scope="session", params=VERSIONS)
def verl(request: pytest.FixtureRequest, patched_tree: Path, clients: Path) -> Iterator[TreeWorker]:
    """verl on megatron_r3, by one setting."""
    yield from _verl(clients, patched_tree, request.param, "megatron_r3.frameworks.verl")


@pytest.fixture(scope="session")
def verl_alone(patched_tree: Path, clients: Path) -> Iterator[TreeWorker]:
    """verl 0.9.1 with its own replay."""
    yield from _verl(clients, patched_tree, "0.9.1", "")


# The files of a framework, by the name of its NAME_client.py, which its workers import. In each
# case the ranks of a worker import the drop-in, or not.


@pytest.fixture(scope="session")
def frameworks(clients: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """For each framework the folders that go on the path; a clone is unpacked once."""

    @functools.cache
    def folders(name: str) -> list[Path]:
        site = clients / "site"
        if name == "ms_swift":
            return [clients / "ms-swift-4.6.0", site]
        out = tmp_path_factory.mktemp(name)
        if name == "skyrl":
            from_clone("SKYRL", ["skyrl", "skyrl-gym/skyrl_gym"], out)
            return [out, out / "skyrl-gym", site]
        return [from_clone("NEMO_RL", ["nemo_rl"], out), site]

    return folders


def _framework(name: str, tree: str) -> Any:
    """A fixture: the worker of a framework on a tree, which is the name of a fixture."""

    @pytest.fixture(scope="session")
    def worker(
        request: pytest.FixtureRequest, frameworks: Callable[[str], Any]
    ) -> Iterator[TreeWorker]:
        folders = frameworks(name)
        root = request.getfixturevalue(tree)
        with worker_with(root, folders, f"{name}_client") as made:
            yield made

    return worker


skyrl, skyrl_unpatched = (_framework("skyrl", t) for t in ("patched_tree", "megatron_tree"))
nemo_rl, nemo_rl_unpatched = (_framework("nemo_rl", t) for t in ("patched_tree", "megatron_tree"))
ms_swift, ms_swift_unpatched = (
    _framework("ms_swift", t) for t in ("patched_tree", "megatron_tree")
)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Where every test was skipped, nothing was shown: `make clients` does not end with 0 then."""
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    stats = reporter.stats if reporter else {}
    if exitstatus == 0 and "skipped" in stats and "passed" not in stats:
        why = sorted({str(report.longrepr[2]) for report in stats["skipped"]})
        reporter.write_line(f"\nerror: nothing was run: {'; '.join(why)}", red=True)
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
