"""The collector of a run: each collection under its policy, once, and the same after every kill.

Shape suffixes (docs/glossary.md): N, U.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from published import publish, save_model, served, write_run

from demo.tool_task import write_tokenizer
from megatron_r3.cli import main
from megatron_r3.cpu.ranks import free_port
from megatron_r3.data.store import RolloutStore
from megatron_r3.loop.collector import Collector
from megatron_r3.loop.config import ConfigError, read_config
from megatron_r3.loop.published import PolicyError, read_policy

pytestmark = pytest.mark.usefixtures("one_thread")
REPO = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    for version in range(3):
        publish(tmp_path / "run" / "policies", version, seed=version)
    return tmp_path


def content(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((folder / "run" / "rollouts").glob("shard-*"))]


def test_each_collection_is_sampled_by_its_policy(folder):
    port = free_port()
    config = read_config(write_run(folder, port))
    with served(port=port):
        Collector(config).run()
    store = RolloutStore([folder / "run" / "rollouts"], mixed_policies=True)
    assert len(store.shards) == 3
    assert store.info.engine == "transformers"
    assert store.column("policy_version").tolist() == [0] * 12 + [1] * 12 + [2] * 12
    # 6 prompts, 4 a collection: 0 1 2 3, then 4 5 0 1, then 2 3 4 5
    groups = store.column("group").reshape(3, 4, 3)[:, :, 0]
    assert groups.tolist() == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]
    assert len({shard.info.policy_stamp for shard in store.shards}) == 3
    events = [*config.directory.read_events("collector")]
    assert [e["event"] for e in events] == ["pushed", "collected"] * 3
    assert [e["version"] for e in events] == [0, 0, 1, 1, 2, 2]
    assert all(e["rollouts"] == 12 and len(e["expert_load"]) == 2 for e in events[1::2])
    rewards = store.column("reward").reshape(3, 12).mean(1)
    assert np.allclose([e["reward"] for e in events[1::2]], rewards)


def test_an_event_that_a_kill_cut_off_is_written_again(folder):
    port = free_port()
    config = read_config(write_run(folder, port))
    with served(port=port):
        Collector(config).run()
    file = config.directory.events("collector")
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]))
    Collector(config).run()  # without a sampler: all is collected
    again = json.loads(file.read_text().splitlines()[-1])
    want = json.loads(lines[-1])
    assert again.pop("time") > want.pop("time")
    del want["seconds"]  # nobody knows any more
    assert again == want
    assert len(file.read_text().splitlines()) == len(lines)


def test_with_a_lag_a_policy_samples_several_collections(folder):
    port = free_port()
    file = write_run(folder, port, 4)
    file.write_text(file.read_text().replace("seed = 5", "seed = 5\nlag = 1"))
    with pytest.raises(ValueError, match="no prompt twice: give 8 or more"):
        Collector(read_config(file))
    file.write_text(file.read_text().replace("per_collection = 4", "per_collection = 3"))
    with served(port=port):
        Collector(read_config(file)).run()
    store = RolloutStore([folder / "run" / "rollouts"], mixed_policies=True)
    assert store.column("policy_version").tolist() == [0] * 18 + [1] * 9 + [2] * 9


@pytest.mark.parametrize("fields", ["top_p = 0.9", "temperature = 0.7"])
def test_sampling_whose_log_probs_a_server_does_not_name_is_refused(folder, fields):
    file = write_run(folder, 30000)
    config = file.read_text()
    for engine in ("sglang", "vllm"):
        file.write_text(config.replace("port =", f'engine = "{engine}"\n{fields}\nport ='))
        with pytest.raises(ConfigError, match=r"\[sampler\] .*; with a top-k, e\.g\. 1000"):
            Collector(read_config(file))
        file.write_text(file.read_text().replace("port =", "top_k = 1000\nport ="))
        assert Collector(read_config(file)).sampling.wants_kept


def started(folder: Path, part: str) -> subprocess.Popen:
    """A part of the run in a folder, as a process."""
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_r3.cli", "rl", part, "run.toml"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.slow
def test_a_collector_and_a_sampler_that_are_killed_give_the_same_rollouts(folder, tmp_path_factory):
    """SIGKILL at random moments, 4 times each; the store is then byte for byte the same."""
    port = free_port()
    write_run(folder, port)
    with served(port=port):
        Collector(read_config(folder / "run.toml")).run()
    want = content(folder)
    assert len(want) == 3

    again = tmp_path_factory.mktemp("again")
    (again / "run").mkdir()
    os.symlink(folder / "run" / "policies", again / "run" / "policies")
    write_run(again, port)
    rng, killed = random.Random(7), {"sampler": 0, "collector": 0}
    running = {part: started(again, part) for part in killed}
    try:
        end = time.monotonic() + 240
        while running["collector"].poll() != 0 and time.monotonic() < end:
            time.sleep(rng.uniform(0.5, 6.0))
            part = rng.choice(["sampler", "collector"])
            if killed[part] < 4 and running["collector"].poll() is None:
                running[part].send_signal(signal.SIGKILL)
                running[part].wait()
                killed[part] += 1
            for name, process in running.items():
                if process.poll() not in (None, 0):
                    running[name] = started(again, name)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    assert sum(killed.values()) >= 3, killed
    assert content(again) == want


# Kills the server at the second rollout of the second collection.
KILLS = """
import os, signal
from pathlib import Path

count = 0

def length(s):
    global count
    count += 1
    if count == 14:
        os.kill(int(Path("server.pid").read_text()), signal.SIGKILL)
    return sum(s.response_tokens) % 7
"""


@pytest.mark.slow
def test_a_server_that_was_started_again_is_verified_again(folder):
    """It has the same policy, and nobody has seen yet that it computes it."""
    port = free_port()
    file = write_run(folder, port, 2)
    (folder / "rewards.py").write_text(KILLS)
    script = REPO / "tests" / "support" / "restarting_server.py"
    words = [sys.executable, str(script), "{model}", "{version}", "{port}", "server.pid"]
    fields = f'engine = "sglang"\nin_place = false\ncommand = {json.dumps(words)}\n'
    text = file.read_text().replace("[sampler]\n", f"[sampler]\n{fields}concurrency = 2\n")
    file.write_text(text.replace("wait = 20", "wait = 60"))
    sampler, collector, starts = started(folder, "sampler"), started(folder, "collector"), 1
    try:
        end = time.monotonic() + 200
        while collector.poll() is None and time.monotonic() < end:
            if sampler.poll():  # 0 is the end of the run, which the collector may be at too
                sampler, starts = started(folder, "sampler"), starts + 1
            time.sleep(0.1)
        assert collector.poll() == 0
        assert sampler.wait(30) == 0, "it ends with the run"
    finally:
        for process in (collector, sampler):
            process.terminate()
            process.wait()
    assert starts == 2
    events = [*read_config(file).directory.read_events("collector")]
    assert [e["version"] for e in events if e["event"] == "pushed"] == [0, 1, 1]
    store = RolloutStore([folder / "run" / "rollouts"], mixed_policies=True)
    assert store.column("policy_version").tolist() == [0] * 12 + [1] * 12
    assert len({(r.group, r.sample) for r in map(store.rollout, range(12, 24))}) == 12


def test_files_of_a_policy_are_read_before_they_are_pushed(folder):
    policies = folder / "run" / "policies"
    save_model(policies / "v000000", seed=7)  # not what the manifest says
    collector = Collector(read_config(write_run(folder, free_port())))
    with pytest.raises(PolicyError, match="not those that the trainer wrote"):
        collector._push(read_policy(policies, 0))


def test_a_push_that_failed_is_not_among_those_before(folder):
    config = read_config(write_run(folder, 1))
    for verified, abs_dlogp in ((True, 0.01), (False, 5.0), (True, 0.02)):
        numbers = {"abs_dlogp": abs_dlogp, "route_agreement": [0.9, 1.0]}
        config.directory.note("collector", "pushed", verified=verified, **numbers)
    assert [one.abs_dlogp for one in Collector(config)._floor().before] == [0.01, 0.02]


def test_a_prompt_file_that_is_too_short_is_refused(folder, capsys):
    file = write_run(folder, 1)
    file.write_text(file.read_text().replace("per_collection = 4", "per_collection = 40"))
    assert main(["rl", "collector", str(file)]) == 1
    assert "6 prompts; policy 0 samples 1 x 40 prompts" in capsys.readouterr().err


AGENTS = """
async def talks(client, prompt):
    history = []
    for turn in range(1 + prompt["group"] % 3):
        history.append({"role": "user", "content": str(turn)})
        more = {"max_tokens": 3} if turn else {}
        answer = await client.chat.completions.create(model="any", messages=history, **more)
        history.append(answer.choices[0].message.model_dump())
    return float(prompt["group"])


async def forks(client, prompt):
    for text in ("1", "2"):
        messages = [{"role": "user", "content": text}]
        await client.chat.completions.create(model="any", messages=messages)
    return 1.0
"""


def run_of_agents(folder, agent):
    """The config of a run whose policy has a tokenizer, and the port of its sampler."""
    port = free_port()
    file = write_run(folder, port, 2, f'[collector]\nagent = "my_agents:{agent}"\n')
    (folder / "my_agents.py").write_text(AGENTS)
    shutil.copytree(folder / "run" / "policies" / "v000000", folder / "start", dirs_exist_ok=True)
    write_tokenizer(folder / "start")
    text = file.read_text().replace('model = "run/policies/v000000"', 'model = "start"')
    file.write_text(text.replace('reward = "rewards:length"\n', ""))
    return read_config(file), port


def test_a_run_of_agents_repeats_itself_bit_for_bit(folder, monkeypatch):
    stores = []
    for _ in range(2):
        monkeypatch.delitem(sys.modules, "my_agents", raising=False)
        config, port = run_of_agents(folder, "talks")
        with served(port=port):
            Collector(config).run()
        stores.append(content(folder))
        store = RolloutStore([folder / "run" / "rollouts"], mixed_policies=True)
        (folder / "run" / "rollouts").rename(folder / f"rollouts{len(stores)}")
        config.directory.events("collector").unlink()
    assert stores[0] == stores[1]
    rollouts = [store.rollout(i) for i in range(24)]
    assert [one.reward for one in rollouts] == [one.group for one in rollouts]
    assert [len(one.spans_U2) for one in rollouts] == [1 + one.group % 3 for one in rollouts]
    assert len({one.tokens_N.tobytes() for one in rollouts}) > 18  # each has seeds of its own


def test_an_agent_of_a_run_makes_one_rollout_of_a_sample(folder, monkeypatch):
    monkeypatch.delitem(sys.modules, "my_agents", raising=False)
    config, port = run_of_agents(folder, "forks")
    with (
        served(port=port),
        pytest.raises(ValueError, match=r"line \d, sample \d: its session made 2 rollouts"),
    ):
        Collector(config).run()
    assert not content(folder)
