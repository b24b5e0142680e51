"""Run directories as a loop leaves them, with made-up numbers: nothing here was trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

START = 1.764e9  # seconds, of the first event
LAYERS = 4


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def make_run(
    directory: Path, steps: int = 40, replay: bool = True, seed: int = 0, restarts: bool = False
) -> Path:
    """Write a run of two steps for each policy version, and return its directory."""
    rng = np.random.default_rng(seed)
    (directory / "policies" / "v000000").mkdir(parents=True)
    (directory / "config.toml").write_text(f"[run]\nseed = {seed}\n")
    metrics = [step_line(rng, step, replay) for step in range(1, steps + 1)]
    write_lines(directory / "metrics.jsonl", metrics)
    for part, lines in events(rng, metrics, restarts).items():
        write_lines(directory / "events" / f"{part}.jsonl", lines)
    return directory


def step_line(rng: np.random.Generator, step: int, replay: bool) -> dict[str, Any]:
    """What the trainer logs of one step; the mismatch is measured in every step."""
    by_layer = rng.uniform(0.1, 0.3, LAYERS)
    names = """reward mean, groups with one reward, learning rate, gradient norm, seconds,
        response length, entropy, effective sample size, policy lag, sampler k3 kl,
        sampler extreme"""
    values = {
        **{f"update/{name.strip()}": rng.uniform(0.1, 0.9) for name in names.split(",")},
        "update/routes from rollout": float(replay),
        "router mismatch": by_layer.mean(),
        **{f"router mismatch/layer {n}": value for n, value in enumerate(by_layer, 1)},
        "token mismatch": 1 - np.prod(1 - by_layer),
        "routes dispatched as recorded": 1.0 if replay else 1 - rng.uniform(0.2, 0.3),
    }
    return {"iteration": step, **{name: round(float(v), 6) for name, v in values.items()}}


def events(
    rng: np.random.Generator, metrics: list[dict[str, Any]], restarts: bool
) -> dict[str, list[dict[str, Any]]]:
    """What trainer, collector and supervisor write of these steps."""
    clock = START
    trainer: list[dict[str, Any]] = []
    collector: list[dict[str, Any]] = []
    supervisor = [
        {"time": clock, "event": "started", "part": part}
        for part in ("sampler", "trainer", "collector")
    ]

    def after(seconds: float, event: str, **fields: Any) -> dict[str, Any]:
        """An event that took so many seconds."""
        nonlocal clock
        took = round(float(rng.lognormal(0, 0.15)) * seconds, 4)
        clock += took
        return {"time": clock, "event": event, "seconds": took, **fields}

    for version, line in enumerate(metrics[::2]):
        if restarts and version == len(metrics) // 4:
            supervisor.append({"time": clock, "event": "died", "part": "trainer", "status": -9})
            supervisor.append({"time": clock + 3, "event": "started", "part": "trainer"})
            clock += 9
        of = {"version": version}
        done = {"bytes": 3145728, "device": "cpu", "iteration": line["iteration"] - 1}
        trainer.append(after(0.4, "published", **of, **done))
        agreement = [round(1 - v, 4) for v in rng.uniform(0.005, 0.03, LAYERS)]
        shown = {"abs_dlogp": round(rng.uniform(0.003, 0.005), 6), "limit": 0.02}
        shown |= {"cached_dlogp": 0.0, "route_agreement": agreement}
        collector.append(after(0.2, "pushed", **of, how="loaded", verified=True, **shown))
        sampled = after(
            1.2, "collected", **of, collection=version, rollouts=64,
            tokens=576 + int(rng.integers(0, 30)), reward=line["update/reward mean"],
            length_cut=round(rng.uniform(0, 0.03), 4), response_length=9.5,
            expert_load=[round(v, 4) for v in rng.uniform(1.5, 2.5, LAYERS)],
        )  # fmt: skip
        collector.append(
            {"time": clock, "event": "examined", **of, "rollouts": 8, "rows": 160,
             "mismatch": round(rng.uniform(0.005, 0.03), 5), "abs_dlogp": 0.004, "alarms": []}
        )  # fmt: skip
        collector.append(sampled)
        collector.append(after(2.0, "waited", **{"for": f"policy {version + 1}"}))
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
