"""What a run makes of a part that ended."""

from __future__ import annotations

import pytest
from published import publish, write_run

from megatron_r3.loop.config import Config, read_config
from megatron_r3.loop.supervisor import _ended


@pytest.fixture
def config(tmp_path, monkeypatch) -> Config:
    monkeypatch.chdir(tmp_path)
    publish(tmp_path / "run" / "policies", 0, seed=0)
    config = read_config(write_run(tmp_path, 1))
    config.directory.log("trainer").parent.mkdir(exist_ok=True)
    return config


def test_a_part_that_refused_something_is_not_started_again(config: Config) -> None:
    text = "error: of an earlier process\n\n--- started\nsome words\nerror: --lr must be a number\n"
    config.directory.log("trainer").write_text(text)
    with pytest.raises(ValueError, match=r"^trainer \(status 1, .*\): --lr must be a number$"):
        _ended(config, "trainer", 1, {"trainer": 0})


def test_what_an_earlier_process_refused_is_no_reason(config: Config, capsys) -> None:
    config.directory.log("trainer").write_text("error: mended since\n\n--- started\nTraceback\n")
    deaths = {"trainer": 0}
    assert not _ended(config, "trainer", 1, deaths)
    assert deaths == {"trainer": 1}
    assert "the trainer died (status 1) and is started again" in capsys.readouterr().out
    deaths["trainer"] = config.run.restarts
    with pytest.raises(ValueError, match="trainer died"):
        _ended(config, "trainer", 1, deaths)
