"""A collection that is killed goes on where it stopped: nothing is lost, nothing twice."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_server import check_store, command, engine, write_inputs

from megatron_r3.store import RolloutStore

PROMPTS, N = 16, 6


def start(folder: Path, url: str, *more: str) -> subprocess.Popen[str]:
    arguments = command(url, N, "--concurrency", "4", "--shard-size", "7", *more)
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_r3.cli", *arguments],
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
        asked = server.asked.total()
        output, error = start(tmp_path, server.url).communicate()
        assert (error.count("\n"), f"{have} were there" in output) == (1, True)
        assert server.asked.total() == asked + PROMPTS * N - have
    check_store(tmp_path / "store", PROMPTS, N)
    shards = RolloutStore([tmp_path / "store"]).shards
    assert sum(len({*s.tensors["group"].tolist()}) for s in shards) == PROMPTS  # all groups whole
    assert all(p.name.startswith("shard-") for p in (tmp_path / "store").iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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


def test_a_signal_before_the_server_answers(tmp_path):
    write_inputs(tmp_path, 1)
    process = start(tmp_path, "http://127.0.0.1:9", "--retry-pause", "9")
    process.stderr.readline()  # the model is read: what follows is the server
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in error
    assert not (tmp_path / "store").exists()
