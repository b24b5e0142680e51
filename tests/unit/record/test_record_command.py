"""`megatron-r3 rollouts record` as a process: signals, kills, and clients that go away."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import pytest
from chat_model import ComputedEngine, tokenizer
from engine_server import engine

from megatron_r3.data.store import RolloutStore

HI = {"role": "user", "content": "hi"}


@contextmanager
def recorder(directory, url, store, *more):
    """The process and a client whose base is its /v1."""
    words = [sys.executable, "-m", "megatron_r3.cli", "rollouts", "record", "--engine", "vllm"]
    words += ["--url", url, "--model", str(directory), "--out", str(store), "--port", "0", *more]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("recording at http://127.0.0.1:"), process.stderr.read()
            with httpx.Client(base_url=line.split()[2], timeout=60) as client:
                yield process, client
        finally:
            process.kill()


@pytest.fixture
def served(chat_model):
    directory, model = chat_model
    with engine(answer=ComputedEngine(model, tokenizer()).answer) as server:
        yield directory, server


def ask(client, session):
    answer = client.post(f"/sessions/{session}/chat/completions", json={"messages": [HI]})
    assert answer.status_code == 200, answer.text


def test_what_was_rewarded_outlives_a_kill_and_the_rest_is_named(served, tmp_path):
    directory, server = served
    store = tmp_path / "store"
    for turn in range(2):
        with recorder(directory, server.url, store) as (process, client):
            for session in ("a", "b"):
                ask(client, session)
            assert client.post("/sessions/a/reward", json={"reward": turn}).status_code == 200
            process.send_signal(signal.SIGKILL)
            process.wait()
        with recorder(directory, server.url, store) as (process, client):
            said = {"role": "assistant", "content": "x"}
            for path, body in (("reward", {"reward": 1}),
                               ("completions", {"prompt": "a"}),
                               ("chat/completions", {"messages": [HI, said, HI]})):  # fmt: skip
                lost = client.post(f"/sessions/b/{path}", json=body)
                assert lost.status_code == 404
                assert "session b: the recorder was killed while" in lost.text
            assert client.post("/sessions/a/reward", json={"reward": 1}).status_code == 404
            if turn:
                ask(client, "b")  # a chat without a message of the model begins the session anew
            assert client.post("/sessions/b/discard").status_code == 200
            ask(client, "c")
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=60)
        assert process.returncode == 0
        first, last = err.splitlines()
        assert first.startswith("not stored: session b: the recorder was killed while this session")
        assert last == "not stored: session c (1 responses): it has no reward"
        assert out == f"{store}: 0 new rollouts\n"
    found = RolloutStore([store])
    found.verify()
    assert found.column("reward").tolist() == [0, 1]
    assert found.column("sample").tolist() == [0, 1]


def test_an_answer_that_no_client_waits_for_is_no_turn(served, tmp_path):
    directory, server = served
    with recorder(directory, server.url, tmp_path / "store") as (_, client):
        server.delay = 2.0
        with pytest.raises(httpx.ReadTimeout):
            client.post("/sessions/s/chat/completions", json={"messages": [HI]}, timeout=0.5)
        server.delay = 0.0
        time.sleep(3)
        assert client.post("/sessions/s/reward", json={"reward": 1}).status_code == 404


def test_the_recorder_ends_with_an_error_once_the_engine_changed(served, tmp_path):
    directory, server = served
    with recorder(directory, server.url, tmp_path / "store") as (process, client):
        server.pages = {**server.pages, "/version": {"version": "0.31.0"}}
        answer = client.post("/sessions/s/chat/completions", json={"messages": [HI]})
        assert answer.status_code == 503
        assert process.wait(60) == 1
        error = process.stderr.read()
    assert "its version was '0.30.0' at the start and is '0.31.0'" in error
    assert "Traceback" not in error


def test_a_port_that_is_taken_is_an_error(served, tmp_path):
    directory, server = served
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ["rollouts", "record", "--engine", "vllm", "--url", server.url, "--port", port]
        words += ["--model", str(directory), "--out", str(tmp_path / "store")]
        done = subprocess.run(
            [sys.executable, "-m", "megatron_r3.cli", *words],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert f"--port {port}: cannot listen there" in done.stderr
    assert not (tmp_path / "store").exists()
