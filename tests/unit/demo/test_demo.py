"""The demo collects with the product's own command."""

from __future__ import annotations

import sys

import pytest
from engine_server import PROMPTS, engine, write_inputs

from demo import collect, online, process, task
from megatron_r3.cli import main
from megatron_r3.collect.reward import RewardSample
from megatron_r3.data.store import RolloutStore


def test_the_reward_is_the_share_of_right_positions():
    def reward(prompt: list[int], response: list[int]) -> float:
        return task.reward(RewardSample({}, prompt, response, {}, "stop", 0, 0))

    prompt, answer = task.problem(5)
    assert reward(prompt, answer) == 1.0
    assert reward(prompt, answer[:-1]) == 0.0
    assert reward(prompt, [answer[0] + 1, *answer[1:]]) == 1 - 1 / len(answer)


def test_the_command_collects_from_a_server_that_answers_as_vllm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path, 3)
    command = collect.collect_command("vllm", "config.json", "prompts.jsonl", "store")
    with engine() as server:
        assert main([*command[3:], "--url", server.url]) == 0
    assert {len(body["prompt"]) for body in server.bodies} == {len(ids) for ids in PROMPTS[:3]}
    store = RolloutStore(["store"])
    assert len(store) == 3 * collect.SAMPLES_PER_PROMPT
    assert (store.info.engine, store.info.model) == ("vllm", tmp_path.name)


def test_lines_of_a_child_are_whole_and_a_failure_shows_the_last_ones(tmp_path):
    code = "import time; print('half', end='', flush=True); time.sleep(0.3); print(' a line')"
    lines, log = [], tmp_path / "logs" / "child.log"
    process.run([sys.executable, "-c", code], log, {}, lines.append)
    assert lines == ["half a line\n"]
    with pytest.raises(process.Failed, match=r"exited with 3; from .*child\.log:\n\.\.\.$"):
        process.run([sys.executable, "-c", "raise SystemExit(3)"], log, {}, lines.append)


def test_a_second_loop_goes_on_or_says_what_it_removes(tmp_path, capsys):
    def begin(seed: int, collections: int) -> tuple[bool, str]:
        """Whether what a run had done is still there, and what was said."""
        places = online.Places("start", "tree", "root")
        online.write_config(config, places, "port = 1", seed, collections)
        done, page = tmp_path / "run" / "metrics.jsonl", tmp_path / "report.html"
        done.parent.mkdir(exist_ok=True)
        done.touch()
        page.touch()
        online.make_way(config, page)
        assert not page.exists()  # it would be of an older run
        return done.exists(), capsys.readouterr().out

    config = tmp_path / "online.toml"
    assert begin(0, 4) == begin(0, 4) == begin(0, 6) == (True, "")
    removed = (
        f"removing {tmp_path / 'run'}, which is a run of another config (seed, sampler, ...)\n"
    )
    assert begin(0, 5) == (False, removed)
    assert begin(0, 5) == (True, "")
    assert begin(1, 5) == (False, removed)


def test_the_loop_is_shown_by_thirds_and_what_must_not_be_is_said():
    numbers = {name: [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.9] for name in online.ROWS}
    numbers["dispatched"] = [1.0] * 28
    numbers["verified"] = [*range(7)]
    assert online.thirds(numbers["reward"]) == pytest.approx([0.15, 0.4, 0.75])
    row = online.table(numbers).splitlines()[1]
    assert row.split() == ["reward", "0.1500", "0.4000", "0.7500"]
    assert online.failures(numbers, 7) == []
    assert "of policies 0 to 7 only [0, 1, 2, 3, 4, 5, 6] were" in online.failures(numbers, 8)[0]
    numbers["dispatched"][3] = 0.9999
    assert "only 0.9999 of a step" in online.failures(numbers, 7)[0]
