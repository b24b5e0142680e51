"""Run directories as a loop leaves them, with numbers as they come out of small models.

Reward, KL and mismatch follow what was measured with routing noise in the sampler: live training
stays where it is, replay learns. Nothing here was trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

START = 1.764e9  # seconds, of the first event
CONFIG = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
}

CONFIG_TOML = """\
[run]
directory = "."
collections = 60
seed = {seed}

[policy]
model = "model"
checkpoint = "checkpoint"

[prompts]
file = "prompts.jsonl"
per_collection = 8
samples = 8
reward = "rewards:right"

[sampler]
engine = "embedded"
degrade = "proof.comparison.degrade:noise"

[trainer]
megatron = "megatron-core"
processes = 2
steps = 2
arguments = [{replaying}"--rollouts-loss", "grpo", "--expert-model-parallel-size=2 --lr 4e-4"]
"""


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def make_run(
    directory: Path,
    steps: int = 40,
    layers: int = 4,
    replay: bool = True,
    seed: int = 0,
    restarts: bool = False,
) -> Path:
    """Write a run of two steps for each policy version, and return its directory."""
    rng = np.random.default_rng(seed)
    (directory / "policies" / "v000000").mkdir(parents=True)
    config = json.dumps({**CONFIG, "num_hidden_layers": layers})
    (directory / "policies" / "v000000" / "config.json").write_text(config)
    replaying = '"--moe-router-replay", ' if replay else ""
    (directory / "config.toml").write_text(CONFIG_TOML.format(seed=seed, replaying=replaying))
    metrics = [step_line(rng, step, steps, layers, replay) for step in range(1, steps + 1)]
    write_lines(directory / "metrics.jsonl", metrics)
    for part, lines in events(rng, metrics, layers, restarts).items():
        write_lines(directory / "events" / f"{part}.jsonl", lines)
    return directory


def step_line(
    rng: np.random.Generator, step: int, steps: int, layers: int, replay: bool
) -> dict[str, Any]:
    """What the trainer logs of one step; the mismatch is measured in every step."""
    done = step / steps
    reward = (0.39 + 0.24 * done**0.7 if replay else 0.40 + 0.02 * done) + rng.normal(0, 0.035)
    kl = (0.105 - 0.03 * done if replay else 0.55 + 0.45 * done) * rng.lognormal(0, 0.18)
    extreme = (0.06 - 0.025 * done if replay else 0.13) * rng.lognormal(0, 0.1)
    depth = np.linspace(0.6, 1.0, layers)
    by_layer = np.clip((0.2 + 0.04 * done) * depth * rng.lognormal(0, 0.03, layers), 0, 1)
    low, high = rng.uniform(0.002, 0.02, 2)
    values = {
        "update/reward mean": reward,
        "update/reward std": float(np.sqrt(reward * (1 - reward))),
        "update/groups with one reward": rng.uniform(0.05, 0.2),
        "update/learning rate": 1e-4 * (1.01 - done),
        "update/gradient norm": rng.uniform(1, 2),
        "update/loss": rng.normal(0, 0.01),
        "update/tokens": 2000.0,
        "update/seconds": rng.uniform(1, 2),
        "update/response length": 9 + rng.normal(0, 0.12) - 0.5 * done,
        "update/entropy": (0.42 - 0.28 * done) * rng.lognormal(0, 0.03),
        "update/clip fraction low": low,
        "update/clip fraction high": high,
        "update/effective sample size": 1 - rng.uniform(0, 0.02) * (1 + 3 * done),
        "update/policy lag": float(rng.integers(0, 2)),
        "update/routes from rollout": float(replay),
        "update/routes live": float(not replay),
        "update/sampler k3 kl": kl,
        "update/sampler extreme": extreme,
        "update/sampler abs dlogp": float(np.sqrt(kl)) * 0.3,
        "router mismatch": float(by_layer.mean()),
        **{f"router mismatch/layer {n + 1}": float(v) for n, v in enumerate(by_layer)},
        "token mismatch": float(1 - np.prod(1 - by_layer)),
        "routes dispatched as recorded": 1.0 if replay else 1 - rng.uniform(0.2, 0.3),
    }
    return {"iteration": step, **{name: round(float(v), 6) for name, v in values.items()}}


def events(
    rng: np.random.Generator, metrics: list[dict[str, Any]], layers: int, restarts: bool
) -> dict[str, list[dict[str, Any]]]:
    """What trainer, collector and supervisor write of these steps."""
    clock = START
    trainer: list[dict[str, Any]] = []
    collector: list[dict[str, Any]] = []
    supervisor = [
        {"time": clock, "event": "started", "part": part}
        for part in ("sampler", "trainer", "collector")
    ]
    for version, line in enumerate(metrics[::2]):
        usual = {"publish": 0.4, "push": 0.2, "sample": 1.2, "wait": 2.0}
        spans = {name: float(rng.lognormal(0, 0.15)) * value for name, value in usual.items()}
        if restarts and version == len(metrics) // 4:
            supervisor.append({"time": clock, "event": "died", "part": "trainer", "status": -9})
            supervisor.append({"time": clock + 3, "event": "started", "part": "trainer"})
            clock += 9
        clock += spans["publish"]
        trainer.append(
            {"time": clock, "event": "published", "version": version, "bytes": 3145728,
             "device": "cpu", "iteration": line["iteration"] - 1,
             "seconds": round(spans["publish"], 4)}
        )  # fmt: skip
        clock += spans["push"]
        collector.append(
            {"time": clock, "event": "pushed", "version": version, "how": "loaded",
             "seconds": round(spans["push"], 4), "verified": True,
             "abs_dlogp": round(0.004 * rng.lognormal(0, 0.25), 6), "limit": 0.02,
             "cached_dlogp": 0.0,
             "route_agreement": [round(1 - v, 4) for v in rng.uniform(0.005, 0.03, layers)]}
        )  # fmt: skip
        clock += spans["sample"]
        collector.append(
            {"time": clock, "event": "examined", "version": version, "rollouts": 8, "rows": 160,
             "mismatch": round(rng.uniform(0.005, 0.03), 5), "abs_dlogp": 0.004, "alarms": []}
        )  # fmt: skip
        load = np.linspace(1.6, 2.4, layers) * rng.lognormal(0, 0.08, layers) + 0.5 * version / len(
            metrics
        )
        collector.append(
            {"time": clock, "event": "collected", "version": version, "collection": version,
             "rollouts": 64, "tokens": 576 + int(rng.integers(0, 30)),
             "seconds": round(spans["sample"], 4), "reward": line["update/reward mean"],
             "reward_std": line["update/reward std"], "length_cut": round(rng.uniform(0, 0.03), 4),
             "response_length": line["update/response length"],
             "expert_load": [round(v, 4) for v in load]}
        )  # fmt: skip
        clock += spans["wait"] + 0.1
        waited = {"for": f"policy {version + 1}", "seconds": round(spans["wait"], 4)}
        collector.append({"time": clock, "event": "waited", **waited})
    supervisor.append({"time": clock, "event": "ended", "part": "trainer", "status": 0})
    return {"trainer": trainer, "collector": collector, "supervisor": supervisor}


# -- reading and changing them


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def change(path: Path, how: Callable[[list[dict[str, Any]]], Any]) -> None:
    lines = lines_of(path)
    how(lines)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def event_with(kind: str, number: int, **fields: Any) -> Callable[[list[dict[str, Any]]], None]:
    """For `change`: other fields in one event of a kind, or in one line of metrics."""

    def how(lines: list[dict[str, Any]]) -> None:
        [line for line in lines if line.get("event", kind) == kind][number].update(fields)

    return how
