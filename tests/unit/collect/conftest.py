"""What the tests of the commands on rollouts share: a folder with a model config, and a store."""

import json
import sys

import pytest
from engine_server import CONFIG
from stored import GROUPED_ROLLOUTS, INFO

from megatron_r3.cli import main
from megatron_r3.data.store import write_shard


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def store(folder):
    write_shard(folder / "store", INFO, GROUPED_ROLLOUTS[:2])
    write_shard(folder / "store", INFO, GROUPED_ROLLOUTS[2:])
    assert main(["rollouts", "convert", "to-parquet", "store", "--out", "r.parquet"]) == 0
    return folder


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """The working directory of a command whose reward is a module in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    return tmp_path
