"""Runs, as the loop and the trainer read them: each has the options and labels that it claims."""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from online_run import make_run
from published import make_tree
from training_arguments import ARGUMENTS

from megatron_r3.collect.reward import RewardSample
from megatron_r3.loop.config import Config, ConfigError, read_config
from megatron_r3.loop.trainer import trainer_command
from megatron_r3.train.update_options import read_loss, read_use, refuse_update
from proof.comparison import run as compare
from proof.comparison.arms import COLLECTIONS, SEEDS, Run, runs_of
from proof.comparison.run import PROMPTS, RESULT, collected, finish, main, run_all, write_config
from proof.comparison.task import EOS, MAX_ANSWER, SEQ_LENGTH, VOCAB_SIZE, problem, reward


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a starting policy has; nothing in it was trained."""
    make_tree(tmp_path / "tree")
    (tmp_path / "start" / "checkpoint").mkdir(parents=True)
    for dtype in ("bfloat16", "float32"):
        (tmp_path / "start" / dtype).mkdir()
        config = {"model_type": "qwen3_moe", "dtype": dtype}
        (tmp_path / "start" / dtype / "config.json").write_text(json.dumps(config))
    return tmp_path


def config_of(folder: Path, regime: str, arm: str, seed: int = 1) -> Config:
    run = Run(regime, arm, seed)
    return read_config(write_config(folder, run, folder / "tree", 31800, COLLECTIONS))


def parsed(config: Config) -> Namespace:
    """The options of the update in the command, before the trainer checks them."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--moe-router-replay", action="store_true")
    parser.add_argument("--rollouts-correction-bounds", type=float, nargs="+")
    for name in ("clip-eps", "clip-eps-high"):
        parser.add_argument(f"--rollouts-{name}", type=float)
    for name in ("rollouts-mini-steps", "global-batch-size"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("loss", "correction", "old-policy"):
        parser.add_argument(f"--rollouts-{name}")
    parser.add_argument("--moe-router-replay-source")
    found, _ = parser.parse_known_args(trainer_command(config))
    return Namespace(**{**ARGUMENTS, **vars(found)})


def test_the_loop_takes_the_config_of_every_run(folder, monkeypatch):
    runs = runs_of()
    assert len(runs) == len({run.key for run in runs}) == (1 + 6 + 6 + 6 + 7) * SEEDS == 78
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    for run in runs:
        config = config_of(folder, *run)
        words = trainer_command(config)
        assert words[1:3] == ["-m", "megatron_r3.cpu"]
        assert words[words.index("--seed") + 1] == str(run.seed + 1)
        assert config.trainer.environment["OMP_NUM_THREADS"] == "1"
        assert config.directory.path == folder / run.key
        prompts = config.path(config.prompts.file).read_text().splitlines()
        assert len(set(prompts)) == len(prompts) == COLLECTIONS * PROMPTS
    monkeypatch.setattr("proof.comparison.run.MINI_STEPS", 3)  # the control
    with pytest.raises(ConfigError, match="make 2 optimizer steps"):
        trainer_command(config_of(folder, "noise", "live"))


def test_some_of_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [run.key for run in runs_of("noise/r3")] == ["noise/r3-0", "noise/r3-1", "noise/r3-2"]
    both = runs_of("noise/r3,stale")
    assert [run.key for run in both][:2] == ["noise/r3-0", "stale/none-0"]
    assert len(both) == (1 + 7) * SEEDS
    for wrong in ("nose", "noise,r3", "noise/none"):
        argv = ["--megatron", str(tmp_path), "--out", str(tmp_path / "out"), "--only", wrong]
        assert main(argv) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: --only {wrong}: there is no")
        assert "the regimes are control" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arm", "source", "loss", "correction"),
    [
        ("none", "", "grpo", ""),
        ("live", "", "grpo", ""),
        ("r3", "rollout", "grpo", ""),
        ("r2", "old-policy", "grpo", ""),
        ("tis", "", "grpo", "tis"),
        ("r3-tis", "rollout", "grpo", "tis"),
        ("gspo-r3", "rollout", "gspo", ""),
    ],
)
def test_what_an_arm_does(arm: str, source: str, loss: str, correction: str, folder: Path) -> None:
    given = parsed(config_of(folder, "stale", arm))
    assert given.moe_router_replay == bool(source)
    assert given.rollouts_old_policy == "trainer"
    refuse_update(given)
    assert read_use(given).source == (source or "live")
    options = read_loss(given)
    assert (options.name, options.correction.name) == (loss, correction or "none")
    assert options.correction.high == 2
    low, high = (0.003, 0.004) if loss == "gspo" else (0.2, 0.2)
    assert (options.clip.low, options.clip.high) == (low, high)


@pytest.mark.parametrize(
    ("regime", "arm", "degrade", "lag", "dtype"),
    [
        ("control", "none", "", 0, "float32"),
        ("bf16", "live", "", 0, "bfloat16"),
        ("fp8", "live", "fp8", 0, "bfloat16"),
        ("noise", "live", "noise", 0, "bfloat16"),
        ("stale", "live", "", 4, "bfloat16"),
        ("stale", "none", "", 4, "float32"),
    ],
)
def test_what_a_regime_does(regime, arm, degrade, lag, dtype, folder):
    config = config_of(folder, regime, arm)
    assert (config.sampler.degrade.rpartition(":")[2], config.run.lag) == (degrade, lag)
    shape = json.loads((config.path(config.policy.model) / "config.json").read_text())
    assert shape["dtype"] == dtype
    assert "--bf16" not in trainer_command(config)  # the trainer computes in float32


def test_arms_of_a_seed_differ_in_their_options_alone(folder: Path) -> None:
    live, r3 = (config_of(folder, "noise", arm).file.read_text() for arm in ("live", "r3"))
    ((of_live, of_r3),) = (
        (a, b)
        for a, b in zip(live.splitlines(), r3.splitlines(), strict=True)
        if a.replace("live-1", "r3-1") != b
    )
    assert of_live.replace('0.2"]', '0.2 --moe-router-replay"]') == of_r3


# -- running them


def test_a_finished_run_is_collected_and_has_left_its_weights_behind(folder: Path) -> None:
    live, r3 = Run("noise", "live", 1), Run("noise", "r3", 0)
    for run in (live, r3):
        make_run(folder / run.key, steps=8, seed=run.seed)
        (folder / run.key / "checkpoints").mkdir()
    assert "reward of collection 4 is missing" in finish(folder, live, 0, 1.0, collections=5)
    assert collected(folder) == []
    assert (folder / live.key / "checkpoints").exists()
    for run in (live, r3):
        assert finish(folder, run, 0, 12.4, collections=4) == ""
        assert not (folder / run.key / "checkpoints").exists()
    assert [(run["arm"], run["seed"]) for run in collected(folder)] == [("r3", 0), ("live", 1)]
    result = json.loads((folder / r3.key / RESULT).read_text())
    assert (result["seconds"], len(result["k3"])) == (12, 4)


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path, capsys):
    """Real `rl run`s, of configs that are refused."""
    (tmp_path / "noise").mkdir()
    (tmp_path / "noise" / "live-0.toml").write_text("[run]\ncolour = 1")
    runs = [Run("noise", "live", 0), Run("noise", "r3", 0)]
    failed = run_all(tmp_path, runs, 2, 1)
    assert "[run] colour: no such name" in failed["noise/live-0"]
    assert f"exit status 1, log {tmp_path}/noise/live-0.log: " in failed["noise/live-0"]
    assert "not readable" in failed["noise/r3-0"]
    assert "2/2 noise/" in capsys.readouterr().out


# -- the task


def test_only_a_whole_answer_has_a_reward() -> None:
    def reward_of(response: list[int]) -> float:
        return reward(RewardSample({}, prompt, response, {}, "stop", 0, 0))

    prompt, answer = problem(5)
    assert reward_of(answer) == 1.0
    assert reward_of(answer[:-1]) == reward_of([*answer, EOS]) == 0.0
    for place, token in enumerate(answer):
        assert reward_of([*answer[:place], (token + 1) % VOCAB_SIZE, *answer[place + 1 :]]) == 0.0
    assert len(answer) == MAX_ANSWER
    assert len(prompt) + len(answer) <= SEQ_LENGTH


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0.0), (0.12, 0.12 * 0.9), (1.0, 0.9)])
def test_a_share_of_the_labels_is_wrong(share: float, expected: float) -> None:
    both = [(problem(i), problem(i, share)) for i in range(400)]
    assert all(right[0] == wrong[0] for right, wrong in both)  # prompts are the same
    assert all(wrong[1][-1] == EOS for _, wrong in both)
    differ = np.array([np.array(right[1]) != np.array(wrong[1]) for right, wrong in both])
    assert abs(differ[:, :-1].mean() - expected) < 0.02


@pytest.mark.parametrize("name", ["megatron_r3/a.py", "demo/a.py", "patches/LINE/a.patch"])
def test_results_of_other_code_are_not_taken(name, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    before = compare.digest_of("options")
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text("other code")
    assert compare.digest_of("options") != before != compare.digest_of("other options")
