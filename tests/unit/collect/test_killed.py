"""A collection that is killed goes on where it stopped: nothing is lost, nothing twice."""

from __future__ import annotations

import base64
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from engine_server import REWARD, check_store, command, engine, write_inputs

from megatron_r3.data.store import RolloutStore

PROMPTS, N = 16, 6


def start(folder: Path, url: str, *more: str, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    arguments = command(url, N, "--concurrency", "4", "--shard-size", "7", *more)
    return run(folder, *arguments, before=before)


def run(folder: Path, *arguments: str, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-m", "megatron_r3.cli", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def stored(folder: Path) -> dict[str, bytes]:
    paths = (folder / "store").glob("shard-*.safetensors")
    return {path.name: path.read_bytes() for path in paths}


def wait_for(ready) -> None:
    deadline = time.monotonic() + 20
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert ready()


@pytest.mark.slow
def test_kill_9_at_any_moment(tmp_path):
    """Killed after so many requests each time, so in the middle of one, or of writing a shard."""
    write_inputs(tmp_path, PROMPTS)
    with engine(delay=0.01) as server:
        before: dict[str, bytes] = {}
        for more in (1, 3, 11, 25, 6, 17, 30):
            process, asked = start(tmp_path, server.url), server.asked.total()
            wait_for(lambda a=asked + more: server.asked.total() >= a)
            process.kill()
            assert process.wait() == -signal.SIGKILL
            process.communicate()
            after = stored(tmp_path)
            assert {name: after[name] for name in before} == before  # nothing stored is touched
            before = after
        assert 10 <= len(RolloutStore([tmp_path / "store"])) < PROMPTS * N
        have = len(RolloutStore([tmp_path / "store"]))
        # With a name, because the server may yet find a request that a killed process had sent.
        output, error = start(tmp_path, server.url.replace("//", "//the:last@")).communicate()
        assert (error.count("\n"), f"{have} were there" in output) == (1, True)
        the_last = "Basic " + base64.b64encode(b"the:last").decode()
        assert server.authorized.count(("POST", the_last)) == PROMPTS * N - have
    check_store(tmp_path / "store", PROMPTS, N)
    shards = RolloutStore([tmp_path / "store"]).shards
    assert sum(len({*s.tensors["group"].tolist()}) for s in shards) == PROMPTS  # all groups whole
    assert all(p.name.startswith("shard-") for p in (tmp_path / "store").iterdir())


# One function of the command answers all three. So each is tried at the start, where that function
# is put in its place, and amid sampling; each other moment gets one of them.
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_stores_whole_groups(tmp_path, number):
    write_inputs(tmp_path, PROMPTS)
    with engine(delay=0.02) as server:
        process = start(tmp_path, server.url, "--shard-size", "1000")
        wait_for(lambda: server.answered.total() > 5 * N + 4)
        process.send_signal(number)
        _, error = process.communicate()
        assert process.returncode == 128 + number
        assert "Traceback" not in error
        have = len(RolloutStore([tmp_path / "store"]))
        assert have >= 4 * N
        assert have % N == 0
        assert f"interrupted; store has {have} of {PROMPTS * N} rollouts" in error
        assert start(tmp_path, server.url).wait() == 0
    check_store(tmp_path / "store", PROMPTS, N)


def test_what_was_started_with_nohup_outlives_its_terminal(tmp_path):
    write_inputs(tmp_path, 5)
    with engine(delay=0.02) as server:
        process = start(tmp_path, server.url, before=["nohup"])
        wait_for(lambda: server.answered.total() > N)
        process.send_signal(signal.SIGHUP)
        assert process.wait(30) == 0
    check_store(tmp_path / "store", 5, N)


@pytest.mark.slow
def test_a_signal_at_any_moment_ends_eight_workers(tmp_path):
    """A server that answers fast: many responses are just there when the signal comes."""
    random = Random(1)
    write_inputs(tmp_path, 400)
    with engine(delay=0.002) as server:
        for trial in range(6):
            number = SIGNALS[trial % 3]
            arguments = command(server.url, N, "--out", f"s{trial}", "--shard-size", "12")
            process = run(tmp_path, *arguments, "--concurrency", "8")
            asked = server.asked.total() + random.randrange(1, 120)
            wait_for(lambda a=asked: server.asked.total() >= a)
            time.sleep(random.random() / 50)
            process.send_signal(number)
            try:
                _, error = process.communicate(timeout=60)
            finally:
                process.kill()
            assert process.returncode == 128 + number, error
            shards = [*(tmp_path / f"s{trial}").glob("shard-*.safetensors")]
            have = len(RolloutStore([tmp_path / f"s{trial}"])) if shards else 0
            assert have % N == 0
            said = f"interrupted; s{trial} has {have} of 2400 rollouts: run the same command "
            assert error.splitlines()[1:] == [said + "again for the rest"]
            left = [path.name for path in (tmp_path / f"s{trial}").glob("*")]
            assert len(left) == len(shards)


SLOW_IMPORT = """
import sys, time
print("importing", file=sys.stderr, flush=True)
time.sleep(60)
"""
SLOW_REWARD = """
import sys, time
def length(sample):
    print("rewarding", file=sys.stderr, flush=True)
    time.sleep(60)
"""
# what a slow disk does, at the first shard
SLOW_DISK = """
import os, sys, time
sync = os.fsync
def slow(file):
    os.fsync = sync
    print("storing", file=sys.stderr, flush=True)
    time.sleep(SECONDS)
    sync(file)
os.fsync = slow
def length(sample):
    return len(sample.response_tokens) + sample.fields.get("bonus", 0)
"""


def line_with(process: subprocess.Popen[str], text: str) -> None:
    while text not in (line := process.stderr.readline()):
        assert line, "the process ended"


@pytest.mark.parametrize(
    ("number", "rewards", "line"),
    [
        *((number, SLOW_IMPORT, "importing") for number in SIGNALS),
        (signal.SIGTERM, REWARD, "has no weights"),  # the model is read: what follows is the server
    ],
)
def test_a_signal_before_sampling_begins(tmp_path, number, rewards, line):
    write_inputs(tmp_path, 1)
    (tmp_path / "rewards.py").write_text(rewards)
    process = start(tmp_path, "http://127.0.0.1:9", "--retry-pause", "9")
    line_with(process, line)
    time.sleep(0.2)
    process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert error == "interrupted: run the same command again for the rest\n"
    assert not (tmp_path / "store").exists()


def test_a_signal_during_a_reward_that_does_not_return(tmp_path):
    write_inputs(tmp_path, 1)
    (tmp_path / "rewards.py").write_text(SLOW_REWARD)
    with engine() as server:
        process = start(tmp_path, server.url)
        line_with(process, "rewarding")
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert f"interrupted; store has 0 of {N} rollouts" in error
    assert not (tmp_path / "store").exists()


def test_a_signal_while_a_shard_is_written(tmp_path):
    """The shard is whole; one signal that comes twice within a moment is one."""
    write_inputs(tmp_path, PROMPTS)
    (tmp_path / "rewards.py").write_text(SLOW_DISK.replace("SECONDS", "0.4"))
    with engine() as server:
        process = start(tmp_path, server.url)
        line_with(process, "storing")
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGHUP)
        _, error = process.communicate(timeout=30)
        assert process.returncode == 128 + signal.SIGHUP
        have = len(RolloutStore([tmp_path / "store"]))
        assert f"interrupted; store has {have} of {PROMPTS * N} rollouts" in error
        assert 0 < have < PROMPTS * N
        assert start(tmp_path, server.url).wait() == 0
    check_store(tmp_path / "store", PROMPTS, N)


def test_a_second_signal_ends_at_once(tmp_path):
    write_inputs(tmp_path, PROMPTS)
    (tmp_path / "rewards.py").write_text(SLOW_DISK.replace("SECONDS", "60"))
    with engine() as server:
        process = start(tmp_path, server.url)
        line_with(process, "storing")
        process.send_signal(signal.SIGTERM)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == -signal.SIGINT
        (tmp_path / "rewards.py").write_text(REWARD)
        assert start(tmp_path, server.url).wait() == 0
    check_store(tmp_path / "store", PROMPTS, N)
    assert all(p.name.startswith("shard-") for p in (tmp_path / "store").iterdir())


def test_a_signal_to_a_server_that_hangs(tmp_path):
    write_inputs(tmp_path, PROMPTS)
    with engine(lambda body, nth: "hang" if nth else "ok") as server:
        process = start(tmp_path, server.url)
        wait_for(lambda: server.asked.total() == 4)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
