"""Mismatch by layer, position, turn and policy version: counted by hand, and in every layout.

The record is what the live router chooses in one process, with sets exchanged in known places. So a
live training differs from it in these places and in no others.

Shape suffixes (docs/glossary.md): C, E, K, L, N, T, U.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slow import slow_except
from training import Policy, train

from megatron_r3.data.store import Rollout, RolloutStore, StoreInfo, write_shard
from megatron_r3.replay.routes import Routes
from megatron_r3.train.dataset import PackedRollouts
from megatron_r3.train.schedule import Schedule, UseOfRollouts
from proof.fidelity.rig.worker import TreeWorker

EXPERTS, SEQUENCE = 16, 64
LAYOUTS = {
    "1": (1, ""),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "packs, CP2": (2, "--rollouts-pack --context-parallel-size 2"),
}
Ids = dict[int, dict[int, list[int]]]  # of each row id, the experts of each layer number


def live_ids(rank: int, argv: list[str]) -> Ids:
    """What a training chooses live in its first step."""
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_r3.train import step

    rows: list[list[int]] = []
    seen: Ids = {}
    run_forward, route = step.run_forward, TopKRouter.forward

    def run(forward: Any, batch: Any, host: Any, microbatch: Any) -> Any:
        rows.append(host["rows"].transpose(0, 1).reshape(-1).tolist())
        return run_forward(forward, batch, host, microbatch)

    def keep(self: Any, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        result = route(self, hidden, *args, **kwargs)
        for row, chosen_E in zip(rows[-1], result[1].detach().numpy(), strict=True):
            seen.setdefault(row, {})[self.layer_number] = np.flatnonzero(chosen_E).tolist()
        return result

    step.run_forward, TopKRouter.forward = run, keep
    train(rank, argv)
    return seen


def conversations(policy: Policy, folder: Path) -> tuple[StoreInfo, list[Rollout]]:
    """The policy's rollouts with two turns each and versions 0 to 6, some in the middle of one."""
    store = RolloutStore([policy.store])
    made = []
    for index in range(len(store)):
        rollout = store.rollout(index)
        first = rollout.prompt_length
        response_N = rollout.response_N.copy()
        response_N[first + 3 : first + 5] = False
        version, spans = rollout.group % 7, None
        if index % 3 == 0:
            spans = np.array([[first, version], [first + 5, version + 1]])
        made.append(
            replace(
                rollout,
                response_N=response_N,
                logprobs_N=np.where(response_N, rollout.logprobs_N, 0).astype(np.float32),
                turns_U2=None,
                versions_C2=spans,
                policy_version=version,
            )
        )
    return replace(store.info, router_fingerprint=(), policy_stamp=""), made


def argv_of(policy: Policy, store: Path, samples: int, *more: str) -> list[str]:
    argv = policy.arguments(
        *("--global-batch-size", str(samples), "--seq-length", str(SEQUENCE)), *more, store=store
    )
    return [a for a in argv if a != "--moe-router-replay-verify-dispatch"]


def without_replay(argv: list[str]) -> list[str]:
    return [a for a in argv if a != "--moe-router-replay"]


@dataclass(frozen=True)
class Prepared:
    """A store, and which of its rows differ from the live routes, bool `[L, T]` a rollout."""

    store: Path
    rollouts: list[Rollout]
    differs: list[np.ndarray]


@pytest.fixture(scope="module")
def prepared(
    patched: TreeWorker, policy: Policy, tmp_path_factory: pytest.TempPathFactory
) -> Prepared:
    folder = tmp_path_factory.mktemp("places")
    info, rollouts = conversations(policy, folder)
    write_shard(folder / "any", info, rollouts)
    argv = without_replay(argv_of(policy, folder / "any", len(rollouts)))
    (live,) = patched.run(live_ids, 1, argv, timeout_s=240)
    store = RolloutStore([folder / "any"])
    rng = np.random.default_rng(0)
    made, differs = [], []
    for index, rollout in enumerate(rollouts):
        rows = store.row_ids(index).tolist()
        ids_LTK = np.array([[live[r][n] for r in rows] for n in sorted(live[rows[0]])])
        # later tokens and deeper layers more often
        chance_T = np.linspace(0.05, 0.5, len(rows))
        wrong_LT = rng.random(ids_LTK.shape[:2]) < chance_T * np.array([[0.2], [0.4], [0.8], [1.0]])
        ids_LTK[wrong_LT] = (ids_LTK[wrong_LT] + 1) % EXPERTS  # another set, also of neighbours
        recorded_T = rng.random(len(rows)) > 0.1
        routes = Routes.from_array(ids_LTK, EXPERTS, recorded_T)
        made.append(replace(rollout, routes=routes))
        differs.append(wrong_LT)
    write_shard(folder / "store", info, made)
    return Prepared(folder / "store", made, differs)


def by_hand(prepared: Prepared, shift: int = 0) -> dict[str, float]:
    """The shares, one token and layer at a time.

    Args:
        shift: by how many tokens the exchanged sets are looked for elsewhere; a control.
    """
    wrong, of = Counter[str](), Counter[str]()
    newest = max(int(r.versions_C2[-1, 1]) if r.versions_C2 is not None else r.policy_version
                 for r in prepared.rollouts)  # fmt: skip
    for rollout, differs_LT in zip(prepared.rollouts, prepared.differs, strict=True):
        for row in range(rollout.routes.num_rows):
            if not rollout.routes.recorded_T[row]:
                continue
            place = 0 if row < 8 else int(math.log2(row)) - 2
            least = 4 * 2**place if place else 0
            names = [f"position {least} to {8 * 2**place - 1}"]
            predicted = row + 1
            is_sampled = bool(rollout.response_N[predicted])
            if not is_sampled:
                names.append("prompt")
            else:
                text_before = ~rollout.response_N[rollout.prompt_length : predicted]
                second = bool(text_before.any())
                version = rollout.policy_version
                if rollout.versions_C2 is not None and predicted >= rollout.versions_C2[1, 0]:
                    version += 1
                lag = newest - version
                names += [f"turn {1 + second}", f"lag {lag if lag < 4 else '4 or more'}"]
            for layer, differs_T in enumerate(differs_LT):
                here = [*names, *([f"layer {layer + 1}", ""] if is_sampled else [])]
                at = (row + shift) % len(differs_T)
                of.update(here)
                wrong.update(here if differs_T[at] else [])
    return {f"router mismatch/{n}".removesuffix("/"): wrong[n] / of[n] for n in of}


def mismatch(
    worker: TreeWorker, layout: str, argv: list[str], store: Path, log: Path
) -> dict[str, float]:
    """The scalars of a step of Megatron's loop."""
    import shlex

    ranks, more = LAYOUTS[layout]
    argv = [*argv, *shlex.split(more), "--rollouts-log", str(log)]
    if "packs" in layout:
        use = UseOfRollouts(SEQUENCE, Schedule(1))
        packs = PackedRollouts(RolloutStore([store]), use, None, 4 if ranks > 1 else 1)
        size = str(len(packs.packs))
        argv += ["--micro-batch-size", "1", "--global-batch-size", size]
    worker.run(train, ranks, argv, timeout_s=240)
    (line,) = log.read_text().splitlines()
    return {k: v for k, v in json.loads(line).items() if k.startswith("router mismatch")}


@pytest.mark.parametrize("layout", slow_except(["PP2", "packs, CP2"], "PP2"))
def test_every_share_is_that_counted_by_hand(patched, policy, prepared, tmp_path, layout):
    argv = without_replay(argv_of(policy, prepared.store, len(prepared.rollouts)))
    got = mismatch(patched, layout, argv, prepared.store, tmp_path / "log.jsonl")
    assert got.pop("router mismatch/alarms") >= 0
    expected = by_hand(prepared)
    assert len(expected) > 14
    assert {"router mismatch/turn 2", "router mismatch/lag 4 or more"} < expected.keys()
    assert got == expected
    assert got != by_hand(prepared, shift=1)
