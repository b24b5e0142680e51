"""Rows that are not true are found before a shard is stored, and nothing of the shard is stored."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published import publish, served, write_run

from megatron_r3.cpu.ranks import free_port
from megatron_r3.data.store import RolloutStore
from megatron_r3.data.store.files import SHARD_GLOB
from megatron_r3.loop.collector import Collector
from megatron_r3.loop.config import read_config
from megatron_r3.loop.embedded import EmbeddedSampler

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    for version in range(2):
        publish(tmp_path / "run" / "policies", version, seed=version)
    file = write_run(tmp_path, free_port(), 2)
    file.write_text(file.read_text().replace("max_tokens = 6", "max_tokens = 12\nexamine = 8"))
    return read_config(file)


class Shifts(EmbeddedSampler):
    """Returns the rows of sampled answers one token too late, from the second policy on."""

    def generate(self, body: Any) -> Any:
        answers = super().generate(body)
        if self.version.startswith("v000001") and isinstance(answers, list):
            for answer in answers:
                meta = answer["meta_info"]
                rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4")
                length = meta["prompt_tokens"] + meta["completion_tokens"] - 1
                moved = np.roll(rows.reshape(length, -1), 1, 0)
                meta["routed_experts"] = base64.b64encode(moved.tobytes()).decode()
        return answers


def events(config: Any, name: str) -> list[dict[str, Any]]:
    return [*config.directory.read_events("collector", name)]


def test_right_rows_are_stored(config):
    with served(port=config.sampler.port):
        Collector(config).run()
    assert len(RolloutStore([config.directory.rollouts], mixed_policies=True)) == 24
    examined = events(config, "examined")
    assert [e["version"] for e in examined] == [0, 1]
    assert all(e["rollouts"] == 8 and not e["alarms"] for e in examined)
    assert max(e["mismatch"] for e in examined) < 0.01


def test_rows_of_other_tokens_are_not_stored(config):
    sampler = Shifts()
    with served(sampler, config.sampler.port), pytest.raises(ValueError, match="shifted rows") as e:
        Collector(config).run()
    assert "12 rollouts are not stored" in str(e.value)
    (shard,) = Path(config.directory.rollouts).glob(SHARD_GLOB)  # of the first policy
    assert RolloutStore([shard.parent]).column("policy_version").tolist() == [0] * 12
    assert "shifted rows" in events(config, "examined")[1]["alarms"][0]
