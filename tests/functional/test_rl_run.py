"""A whole run of the loop: sampler, collector and trainer as processes, killed and started again.

MEGATRON_R3_KILLS=20 kills each part so often. Without it the trainer is killed once: samplers and
collectors that are killed are for tests/unit/loop/test_collector.py.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from training import Policy

from demo import task
from demo.model import arguments
from megatron_r3.data.store import RolloutStore
from megatron_r3.loop.published import published, read_policy
from megatron_r3.loop.run_directory import RunDirectory

REPO = Path(__file__).parents[2]
KILLS = int(os.environ.get("MEGATRON_R3_KILLS", "1"))
COLLECTIONS = max(3, KILLS // 2)
PARTS = ("sampler", "collector", "trainer") if KILLS > 1 else ("trainer",)
CONFIG = """
[run]
directory = "run"
collections = {collections}
seed = 3
wait = 300
restarts = 1000

[policy]
model = "{policy.hf}"
checkpoint = "{policy.checkpoint}"

[sampler]
port = {port}
max_tokens = 13

[prompts]
file = "prompts.jsonl"
per_collection = 4
samples = 4
reward = "demo.task:reward"

[trainer]
megatron = "{tree}"
script = "-m megatron_r3.cpu {root}/demo/pretrain.py"
processes = 2
checkpoint_every = {checkpoint_every}
arguments = {arguments}

[trainer.environment]
OMP_NUM_THREADS = "1"
"""
TRAINING = """
--micro-batch-size 4 --global-batch-size 16 --lr 1e-3 --calculate-per-token-loss
--moe-router-load-balancing-type none --expert-model-parallel-size 2 --moe-router-replay
--moe-router-replay-verify-dispatch --moe-router-replay-log-mismatch-interval 1
--lr-decay-style constant
""".split()


def started(
    folder: Path,
    policy: Policy,
    tree: Path,
    checkpoint_every: int = 1,
    collections: int = COLLECTIONS,
) -> subprocess.Popen:
    """`megatron-r3 rl run` in a folder of its own."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    task.write_prompts(folder / "prompts.jsonl", 16, 30_000_000)
    (folder / "run.toml").write_text(
        CONFIG.format(
            collections=collections,
            policy=policy,
            port=port,
            tree=tree,
            root=REPO,
            checkpoint_every=checkpoint_every,
            arguments=json.dumps(arguments(TRAINING)),
        )
    )
    return rl_run(folder)


def rl_run(folder: Path) -> subprocess.Popen:
    """The command, for the config that is there."""
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_r3.cli", "rl", "run", "run.toml"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ends(process: subprocess.Popen, seconds: float) -> str:
    """What it printed."""
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == 0, output
    return output


def find(process: subprocess.Popen, part: str) -> psutil.Process | None:
    """The process of a part, below the supervisor."""
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            words = child.cmdline()
        except psutil.NoSuchProcess:
            continue
        if words[1:4] == ["-m", "megatron_r3.cli", "rl"] and words[4] == part:
            return child
    return None


def ranks_in(folder: Path) -> list[int]:
    """The trainer's ranks that work on a run in this folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if "pretrain.py" in words and str(folder) in words:
            found.append(process.pid)
    return found


def kill_at_random(process: subprocess.Popen, times: int) -> dict[str, int]:
    """SIGKILL each part at random moments, as long as the run goes on; how often each was hit."""
    rng, hit = random.Random(11), dict.fromkeys(PARTS, 0)
    while process.poll() is None and min(hit.values()) < times:
        time.sleep(rng.uniform(0.5, 8.0))
        part = rng.choice([part for part in PARTS if hit[part] < times])
        victim = find(process, part) if process.poll() is None else None
        if victim is None:
            continue
        ranks = [c for c in victim.children(recursive=True) if "pretrain.py" in str(c.cmdline())]
        if part == "trainer" and ranks and rng.random() < 0.5:  # a rank alone, or all at once
            victim = rng.choice(ranks)
        victim.send_signal(signal.SIGKILL)
        hit[part] += 1
    return hit


@pytest.fixture(scope="module")
def undisturbed(policy: Policy, patched_tree: Path, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("undisturbed")
    printed = ends(started(folder, policy, patched_tree), 300 + 60 * COLLECTIONS).splitlines()
    (folder / "printed").write_text("\n".join(printed))
    return folder / "run"


def test_every_policy_is_verified_and_samples_its_collection(undisturbed: Path) -> None:
    assert published(undisturbed / "policies") == [*range(COLLECTIONS + 1)]
    store = RolloutStore([undisturbed / "rollouts"], mixed_policies=True)
    versions = np.repeat(np.arange(COLLECTIONS), 16)
    assert store.column("policy_version").tolist() == versions.tolist()
    events = [json.loads(line) for line in (undisturbed / "events/collector.jsonl").open()]
    pushed = [event for event in events if event["event"] == "pushed"]
    assert [event["version"] for event in pushed] == [*range(COLLECTIONS)]
    assert all(event["verified"] and event["abs_dlogp"] < 0.1 for event in pushed)
    steps = [json.loads(line) for line in (undisturbed / "metrics.jsonl").open()]
    assert [step["iteration"] for step in steps] == [*range(1, COLLECTIONS + 1)]
    assert all(step["routes dispatched as recorded"] == 1.0 for step in steps)
    assert all(step["update/policy lag max"] == 0 for step in steps)


def test_a_line_for_each_collection_and_where_to_look(undisturbed: Path) -> None:
    first, *lines, last = (undisturbed.parent / "printed").read_text().splitlines()
    words = f"{undisturbed}: {COLLECTIONS} collections, replaying the sampler's experts; logs: "
    assert first.startswith(words)
    assert f"megatron-r3 rl report {undisturbed}" in first
    for number, line in enumerate(lines):
        assert line.startswith(f"collection {number}: policy {number}, reward 0.")
        assert " 16 rollouts in " in line
    assert len(lines) == COLLECTIONS
    assert last == f"{undisturbed}: {COLLECTIONS} collections are sampled and trained"


def test_a_run_whose_parts_are_killed_ends_with_the_same_policy(
    undisturbed: Path, policy: Policy, patched_tree: Path, tmp_path: Path
) -> None:
    # a trainer that is killed repeats up to two collections, and publishes their policies again
    process = started(tmp_path, policy, patched_tree, 2, COLLECTIONS - 1)
    hit = kill_at_random(process, KILLS)
    ends(process, 300 + 60 * COLLECTIONS + 60 * KILLS)
    # over, and made longer
    text = (tmp_path / "run.toml").read_text()
    longer = text.replace(f"collections = {COLLECTIONS - 1}", f"collections = {COLLECTIONS}")
    (tmp_path / "run.toml").write_text(longer)
    printed = ends(rl_run(tmp_path), 300).splitlines()
    told = [line.partition(":")[0] for line in printed if line.startswith("collection ")]
    assert told == [f"collection {COLLECTIONS - 1}"]
    assert sum(hit.values()) >= KILLS, hit
    assert not ranks_in(tmp_path), "a rank of a trainer that was killed lives on"
    run = tmp_path / "run"
    for version in range(COLLECTIONS + 1):
        got, want = (read_policy(place / "policies", version) for place in (run, undisturbed))
        got.check_files()
        assert got.files == want.files, f"policy {version} of {hit}"
    events = RunDirectory(run).read_events("trainer", "published")
    noted = {event["version"] for event in events}
    assert noted == {*range(COLLECTIONS + 1)}
    shards, wanted = (sorted((place / "rollouts").glob("shard-*")) for place in (run, undisturbed))
    assert [path.name for path in shards] == [path.name for path in wanted]
    assert [path.read_bytes() for path in shards] == [path.read_bytes() for path in wanted]
