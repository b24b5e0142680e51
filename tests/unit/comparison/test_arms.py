"""Arms and regimes, as the loop and the trainer read them: each has the options that it claims."""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from pathlib import Path

import pytest
from published import make_tree
from training_arguments import ARGUMENTS

from megatron_r3.loop.config import Config, ConfigError, read_config
from megatron_r3.loop.trainer import trainer_command
from megatron_r3.train.update_options import read_loss, read_use, refuse_update
from proof.comparison.arms import ARMS, COLLECTIONS, REGIMES, SEEDS, Run, dtype_of, runs_of
from proof.comparison.config import PROMPTS, write_config
from proof.comparison.policy import DTYPES, StartingPolicy, _with_dtype


@pytest.fixture
def start(tmp_path: Path) -> StartingPolicy:
    """Folders as the starting policy has them; nothing in them was trained."""
    make_tree(tmp_path / "tree")
    made = StartingPolicy(tmp_path / "start", tmp_path / "tree")
    made.checkpoint.mkdir(parents=True)
    made.hf("bfloat16").mkdir()
    config = {"model_type": "qwen3_moe", "dtype": "bfloat16"}
    (made.hf("bfloat16") / "config.json").write_text(json.dumps(config))
    _with_dtype(made.hf("bfloat16"), made.hf("float32"), "float32")
    return made


def config_of(start: StartingPolicy, regime: str, arm: str, seed: int = 1) -> Config:
    run = Run(REGIMES[regime], ARMS[arm], seed)
    folder = start.out.parent / "runs" / regime
    return read_config(write_config(folder, run, start, "python", 31800, COLLECTIONS))


def words_of(config: Config) -> list[str]:
    return trainer_command(config)


def parsed(config: Config) -> Namespace:
    """The options of the update in the command, before the trainer checks them."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--moe-router-replay", action="store_true")
    parser.add_argument("--rollouts-correction-bounds", type=float, nargs="+")
    parser.add_argument("--rollouts-clip-eps", type=float)
    parser.add_argument("--rollouts-clip-eps-high", type=float)
    parser.add_argument("--rollouts-mini-steps", type=int)
    parser.add_argument("--global-batch-size", type=int)
    for name in ("loss", "correction", "old-policy"):
        parser.add_argument(f"--rollouts-{name}")
    parser.add_argument("--moe-router-replay-source")
    found, _ = parser.parse_known_args(words_of(config))
    return Namespace(**{**ARGUMENTS, **vars(found)})


def test_the_loop_takes_the_config_of_every_run(start: StartingPolicy) -> None:
    for run in runs_of():
        config = config_of(start, run.regime.key, run.arm.key, run.seed)
        words = words_of(config)
        assert words[:3] == ["python", "-m", "megatron_r3.cpu"]
        assert words[words.index("--seed") + 1] == str(run.seed + 1)
        assert config.trainer.environment["OMP_NUM_THREADS"] == "1"
        assert config.run.lag == (4 if run.regime.key == "stale" else 0)
        assert config.directory.path == start.out.parent / "runs" / run.key
        prompts = config.path(config.prompts.file).read_text().splitlines()
        assert len(prompts) == COLLECTIONS * PROMPTS
        assert len(set(prompts)) == len(prompts)


def test_the_control_of_that_check(start: StartingPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proof.comparison.config.MINI_STEPS", 3)
    with pytest.raises(ConfigError, match="make 2 optimizer steps"):
        words_of(config_of(start, "noise", "live"))


def test_how_many_runs_there_are() -> None:
    runs = runs_of()
    assert len(runs) == len({run.key for run in runs}) == (1 + 6 + 6 + 6 + 7) * SEEDS == 78
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    assert [run.key for run in runs_of("noise/r3")] == ["noise/r3-0", "noise/r3-1", "noise/r3-2"]
    assert {run.regime.key for run in runs_of("fp8", 1)} == {"fp8"}
    both = runs_of("noise/r3,stale", 1)
    assert [run.key for run in both][:2] == ["noise/r3-0", "stale/none-0"]
    assert len(both) == 1 + 7
    for wrong in ("nose", "noise,r3", "noise/none"):
        with pytest.raises(ValueError, match=rf"--only {wrong}: there is no .*regimes are control"):
            runs_of(wrong)


@pytest.mark.parametrize(
    ("arm", "replays", "source", "loss", "correction"),
    [
        ("none", False, "", "grpo", ""),
        ("live", False, "", "grpo", ""),
        ("r3", True, "rollout", "grpo", ""),
        ("r2", True, "old-policy", "grpo", ""),
        ("tis", False, "", "grpo", "tis"),
        ("r3-tis", True, "rollout", "grpo", "tis"),
        ("gspo-r3", True, "rollout", "gspo", ""),
    ],
)
def test_what_an_arm_does(
    arm: str, replays: bool, source: str, loss: str, correction: str, start: StartingPolicy
) -> None:
    given = parsed(config_of(start, "stale", arm))
    assert given.moe_router_replay == replays
    assert given.rollouts_old_policy == "trainer"
    refuse_update(given)
    assert read_use(given).source == (source or "live")
    options = read_loss(given)
    assert (options.name, options.correction.name) == (loss, correction or "none")
    assert options.correction.high == 2
    low, high = (0.003, 0.004) if loss == "gspo" else (0.2, 0.2)
    assert (options.clip.low, options.clip.high) == (low, high)


@pytest.mark.parametrize(
    ("regime", "noise", "fp8", "dtype"),
    [
        ("bf16", 0.0, False, "bfloat16"),
        ("fp8", 0.0, True, "bfloat16"),
        ("noise", 0.7, False, "bfloat16"),
        ("stale", 0.0, False, "bfloat16"),
    ],
)
def test_what_a_regime_does(
    regime: str, noise: float, fp8: bool, dtype: str, start: StartingPolicy
) -> None:
    config = config_of(start, regime, "live")
    assert (config.degrade.router_noise, config.degrade.fp8) == (noise, fp8)
    shape = json.loads((config.path(config.policy.model) / "config.json").read_text())
    assert shape["dtype"] == dtype == dtype_of(Run(REGIMES[regime], ARMS["live"], 0))


def test_without_a_mismatch_the_sampler_computes_as_the_trainer(start: StartingPolicy) -> None:
    for regime in ("control", "stale"):
        config = config_of(start, regime, "none")
        shape = json.loads((config.path(config.policy.model) / "config.json").read_text())
        assert shape["dtype"] == DTYPES[1] == "float32"
        assert not config.degrade.fp8
        assert config.degrade.router_noise == 0
    assert "--bf16" not in words_of(config)


def test_arms_of_a_seed_differ_in_their_options_alone(start: StartingPolicy) -> None:
    live, r3 = (config_of(start, "noise", arm).file.read_text() for arm in ("live", "r3"))
    differing = [
        (a, b)
        for a, b in zip(live.splitlines(), r3.splitlines(), strict=True)
        if a.replace("live-1", "r3-1") != b
    ]
    ((of_live, of_r3),) = differing
    assert set(json.loads(of_r3).split()) - set(json.loads(of_live).split()) == {
        "--moe-router-replay"
    }
