"""The recorder, the engine or the agent is killed while sessions run: what was answered is stored.

What was not stored is named.

RECORD_KILLS says how often each of the three is killed.

Shape suffixes (docs/glossary.md): K, L, N, T, U.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import killable
import numpy as np
import pytest
from chat_model import tokenizer

from megatron_r3.cli import main
from megatron_r3.cpu.ranks import free_port
from megatron_r3.data.store import RolloutStore

KILLS = int(os.environ.get("RECORD_KILLS", "2"))


class Processes:
    """The three processes, the agent's log, and what the recorder has said."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.store, self.log, self.errors = folder / "store", folder / "log", folder / "errors"
        self.log.touch()
        self._ports = {"engine": free_port(), "recorder": free_port()}
        self._url = f"http://127.0.0.1:{self._ports['engine']}"
        self._words = ["rollouts", "record", "--engine", "vllm", "--url", self._url]
        self._words += ["--model", str(model), "--out", str(self.store), "--retries", "2"]
        self._words += ["--port", str(self._ports["recorder"]), "--sessions", "2000"]
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._agents = 0

    def start(self, who: str) -> None:
        """Start a process; the recorder and the engine get the ports that they had before."""
        words = [killable.__file__, who]
        if who == "engine":
            words += [str(self._ports[who])]
        elif who == "agent":
            self._agents += 1  # the first sessions of two agents are never the same
            base = f"http://127.0.0.1:{self._ports['recorder']}/v1"
            words += [base, str(self.log), str(100_000 * self._agents)]
        else:
            words = ["-m", "megatron_r3.cli", *self._words]
        with self.errors.open("a") as errors:
            self._running[who] = subprocess.Popen(
                [sys.executable, *words], stdout=subprocess.PIPE, stderr=errors, text=True
            )
        if who == "recorder":
            line = self._running[who].stdout.readline()
            assert line.startswith("recording at"), self.errors.read_text()

    def end(self, who: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to a process that must be running, and wait for its end."""
        process = self._running.pop(who)
        assert process.poll() is None, self.errors.read_text()
        process.send_signal(number)
        process.communicate(timeout=60)
        return process.returncode

    def end_all(self) -> None:
        for who in list(self._running):
            with suppress(AssertionError):
                self.end(who)

    def logged(self, word: str) -> set[int]:
        """The numbers of the sessions whose reward was asked for, or answered."""
        lines = [line.split() for line in self.log.read_text().splitlines()]
        return {int(number) for said, number in lines if said == word}

    def named(self, why: str) -> set[int]:
        """The numbers of the sessions that the recorder has named as not stored."""
        pattern = rf"not stored: session s(\d+){re.escape(why)}"
        return set(map(int, re.findall(pattern, self.errors.read_text())))

    def wait_for(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not ready():
            assert time.monotonic() < deadline, self.errors.read_text()
            time.sleep(0.002)


@pytest.fixture
def processes(tmp_path: Path, chat_model: tuple[Path, object]) -> Iterator[Processes]:
    made = Processes(tmp_path, chat_model[0])
    try:
        made.start("engine")
        made.start("recorder")
        made.start("agent")
        yield made
    finally:
        made.end_all()


def check(store: RolloutStore, asked: set[int], answered: set[int]) -> None:
    """Each answered session is stored once and whole, and nothing that was not asked for is."""
    numbers = store.column("reward").astype(int).tolist()
    assert len({*numbers}) == len(numbers)
    assert answered <= {*numbers} <= asked
    text_of = tokenizer().decode
    for index, number in enumerate(numbers):
        rollout = store.rollout(index)
        assert len(rollout.spans_U2) == killable.TURNS
        assert killable.question(number) in text_of(rollout.tokens_N.tolist())
        ids = killable.routes_of(rollout.tokens_N)
        assert np.array_equal(rollout.routes.ids_LTK, ids[:, :-1])
        sampled_N = rollout.response_N
        logprobs_N = killable.logprobs_of(rollout.tokens_N)
        assert np.array_equal(rollout.logprobs_N[sampled_N], logprobs_N[sampled_N])


@pytest.mark.slow
@pytest.mark.parametrize("who", ["recorder", "engine", "agent"])
def test_kill_9_while_sessions_run(who, processes, capsys):
    random = Random(who)
    for _ in range(KILLS):
        more = len(processes.logged("answered")) + random.randrange(1, 40)
        processes.wait_for(lambda more=more: len(processes.logged("answered")) >= more)
        time.sleep(random.random() / 4)  # a shard is written every 0.2 s
        assert processes.end(who) == -signal.SIGKILL
        time.sleep(random.random())
        processes.start(who)
    before = len(processes.logged("answered"))
    processes.wait_for(lambda: len(processes.logged("answered")) >= before + killable.SESSIONS)
    processes.end("agent")
    assert processes.end("recorder", signal.SIGTERM) == 0
    assert main(["rollouts", "verify", str(processes.store)]) == 0
    store = RolloutStore([processes.store])
    asked, answered = processes.logged("asked"), processes.logged("answered")
    check(store, asked, answered)
    for wrong in ((asked, answered | {-1}), (asked - answered, set())):  # a control of the check
        with pytest.raises(AssertionError):
            check(store, *wrong)
    lost, named = processes.named(": the recorder was killed"), processes.named("")
    assert bool(lost) == (who == "recorder")
    assert not lost & answered
    assert asked - {*store.column("reward").astype(int).tolist()} <= named
    assert all(path.name.startswith("shard-") for path in processes.store.iterdir())
    assert "Traceback" not in processes.errors.read_text()
    with capsys.disabled():
        print(
            f"\n{KILLS} kills of the {who}: {len(answered)} rewards answered, {len(store)} stored"
        )
