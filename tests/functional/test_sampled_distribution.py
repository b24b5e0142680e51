"""Rollouts at a temperature and with top-p: the trainer has the sampler's log-probs, in float32."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from once import Once
from slow import slow_except
from training import Policy, differences, export, train

from demo import task
from demo.model import arguments
from megatron_r3.cli import main
from megatron_r3.data.store import RolloutStore, write_shard
from megatron_r3.train.losses.advantages import group_normalised
from proof.fidelity.rig.worker import TreeWorker

LAYOUTS = {
    "TP2 SP": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "CP2": (2, ["--context-parallel-size", "2"]),
    "PP2": (2, ["--pipeline-model-parallel-size", "2"]),
}


def in_float32(source: Path, target: Path) -> None:
    """The same model, whose weights and computation are float32."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).save_pretrained(target)
    for file in source.glob("*token*"):
        (target / file.name).write_bytes(file.read_bytes())


@pytest.fixture(scope="session")
def cut(patched: TreeWorker, policy: Policy, once: Once) -> Policy:
    """A policy in float32, and rollouts at temperature 0.7 with top-p 0.9."""

    def make(folder: Path) -> None:
        in_float32(policy.hf, folder / "hf")
        save = ["--save", str(folder / "checkpoint"), "--save-interval", "1"]
        argv = arguments(["--micro-batch-size", "1", *save], ["--hf-import", str(folder / "hf")])
        patched.run(export, 1, argv, timeout_s=120)
        task.write_prompts(folder / "prompts.jsonl", 8, 10_000_000)
        argv = ["rollouts", "collect", "--engine", "transformers", "--model", str(folder / "hf")]
        argv += ["--prompts", str(folder / "prompts.jsonl"), "--out", str(folder / "store")]
        argv += ["--n", "4", "--seed", "1", "--temperature", "0.7", "--top-p", "0.9"]
        argv += ["--max-tokens", str(task.MAX_ANSWER), "--reward", "demo.task:reward"]
        assert main(argv) == 0

    folder = once("cut", make)
    return Policy(folder / "checkpoint", folder / "hf", folder / "store")


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, "TP2 SP", "PP2"))
def test_log_probs_agree_with_the_sampler(patched: TreeWorker, cut: Policy, layout: str) -> None:
    ranks, more = LAYOUTS[layout]
    parts = patched.run(differences, ranks, cut.arguments(*more), timeout_s=180)
    found = torch.cat([part for rank in parts for part in rank])
    assert len(found) > 100
    assert found.max() < 1e-5


def test_without_what_was_kept_they_do_not(patched, cut, tmp_path):
    store = RolloutStore([cut.store])
    rollouts = [replace(store.rollout(i), kept=None) for i in range(len(store))]
    sampling = replace(store.info.sampling, logprobs_of=None)
    write_shard(tmp_path / "store", replace(store.info, sampling=sampling), rollouts)
    argv = cut.arguments("--rollouts-sampling", "any", store=tmp_path / "store")
    (parts,) = patched.run(differences, 1, argv, timeout_s=120)
    assert torch.cat(parts).max() > 0.1


@pytest.mark.parametrize("layout", slow_except(["TP2 SP", "CP2"], "CP2"))
def test_the_values_of_the_update_are_logged(patched, cut, tmp_path, layout):
    file, (ranks, more) = tmp_path / "log.jsonl", LAYOUTS[layout]
    patched.run(train, ranks, cut.arguments("--rollouts-log", str(file), *more), timeout_s=180)
    (line,) = map(json.loads, file.read_text().splitlines())
    assert line["update/learning rate"] == pytest.approx(1e-3)
    assert line["update/gradient norm"] > 0 < line["update/seconds"]
    store = RolloutStore([cut.store])
    reward = store.column("reward")
    trained = [len(store.fields(i)["tokens"]) - 1 for i in range(len(store))]
    assert line["update/tokens"] == sum(trained) != sum(trained[1:])  # once, in each layout
    lengths = [int(store.fields(i)["response"].sum()) for i in range(len(store))]
    advantages = group_normalised(reward, store.column("group"))
    by_hand = -float(advantages @ lengths) / sum(lengths)  # the ratio is 1
    assert line["update/loss"] == pytest.approx(by_hand, abs=1e-4)
    assert line["update/loss"] != pytest.approx(-by_hand, abs=1e-4)
    assert line["update/reward mean"] == pytest.approx(reward.mean())
    assert line["update/reward std"] == pytest.approx(reward.std(), abs=1e-6)
    assert line["update/response length"] == pytest.approx(sum(lengths) / len(store))
    assert line["update/ratio"] == pytest.approx(1.0, abs=1e-4)
    assert line["update/effective sample size"] == pytest.approx(1.0)
    assert line["update/routes from rollout"] == 1
    assert line["update/clip fraction low"] == line["update/clip fraction high"] == 0
    assert 0 < line["update/entropy"] < 5.6  # log 256 is the most
    assert line["update/sampler perplexity"] == pytest.approx(
        line["update/trainer perplexity"], rel=1e-4
    )
