"""Collecting from a server that answers with recorded responses, or fails in every way."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from engine_server import (
    CHAT,
    CONFIG,
    PROMPTS,
    REWARD,
    Raw,
    check_store,
    command,
    engine,
    write_inputs,
)

from megatron_r3.cli import main
from megatron_r3.data.store import RolloutStore


@pytest.fixture
def folder(empty_folder):
    write_inputs(empty_folder, 6)
    return empty_folder


def collect(url: str, n: int, *more: str) -> int:
    return main(command(url, n, *more))


def leftovers(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if not p.name.startswith("shard-"))


def test_every_sample_is_stored_once_and_not_asked_for_again(folder, capsys):
    with engine() as server:
        assert collect(server.url, 4, "--shard-size", "5", "--concurrency", "3") == 0
        assert server.most <= 3
        assert len(server.asked) == 24
        assert {*server.asked.values()} == {1}
        check_store(folder / "store", 6, 4)
        store = RolloutStore([folder / "store"])
        assert [shard.num_rollouts for shard in store.shards] == [8, 8, 8]
        assert len({*store.column("group")[:8].tolist()}) == 2  # groups are whole
        assert (store.info.engine, store.info.engine_version) == ("vllm", "0.30.0")
        assert store.info.model == folder.name
        assert leftovers(folder / "store") == []
        output = capsys.readouterr()
        assert "store has all 24 rollouts: 0 were there, 24 new" in output.out
        assert output.err == "config.json has no weights: no digest of them is stored\n"
        assert collect(server.url, 4) == 0
        assert server.asked.total() == 24
        assert "24 were there, 0 new" in capsys.readouterr().out
        assert collect(server.url, 6, "--policy-version", "0") == 0
        assert server.asked.total() == 36
    check_store(folder / "store", 6, 6)


def test_what_is_asked(folder):
    with engine() as server:
        assert collect(server.url + "/v1/", 1, "--max-tokens", "12") == 0
    for body in server.bodies:
        assert body["path"] == "/v1/completions"
        assert (body["model"], body["n"], body["logprobs"]) == ("served", 1, 1)
        assert (body["max_tokens"], body["temperature"], body["top_p"]) == (12, 1.0, 1.0)
        assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (0, 0.0, 1.0)
        assert body["return_token_ids"] is True


def test_chats(folder):
    line = {"messages": CHAT["request"]["messages"], "id": "fox"}
    (folder / "prompts.jsonl").write_text(json.dumps(line))
    with engine(lambda body, nth: "404" if "path" in body else "ok") as server:
        assert collect(server.url, 2) == 0
    assert server.bodies[0]["path"] == "/v1/chat/completions"
    assert server.bodies[0]["logprobs"] is True
    assert "model" not in server.bodies[0]
    store = RolloutStore([folder / "store"])
    assert store.info.engine_version == "unknown"
    assert store.column("sample").tolist() == [0, 1]
    assert (store.column("group") > 2**31).all()
    assert store.column("reward").tolist() == [12, 12]


FAILURES = ["disconnect", "half", "hang", "429", "500", "503"]


def test_what_may_pass_is_asked_again(folder):
    """Each sample meets each failure once, in turn."""
    fail = len(FAILURES)
    with engine(lambda body, nth: FAILURES[nth - 1] if 0 < nth <= fail else "ok") as server:
        arguments = ["--timeout", "1", "--concurrency", "24", "--retries", str(2 * fail)]
        assert collect(server.url, 2, *arguments) == 0
        assert min(server.asked.values()) == fail + 1
    check_store(folder / "store", 6, 2)


REFUSALS = ["zeros", "garbage", "odd", "abort"]


@pytest.mark.parametrize("how", REFUSALS)
def test_refused_responses_are_asked_for_again_and_never_stored(folder, capsys, how):
    """Prompt 1 gets a good response at the third try, prompt 2 never."""

    def behave(body, nth):
        bad = {PROMPTS[1]: 2, PROMPTS[2]: 99}
        return how if nth <= bad.get(tuple(body.get("prompt", ())), 0) else "ok"

    with engine(behave) as server:
        (folder / "prompts.jsonl").write_text(
            "".join((folder / "prompts.jsonl").read_text().splitlines(True)[:5])
        )
        assert collect(server.url, 2) == 1
        assert sorted(server.asked.values()) == [1] * 6 + [3] * 4
    error = capsys.readouterr().err
    assert (
        "store has 8 of 10 rollouts: samples given up: 2; the same command tries them again"
        in error
    )
    assert error.count("not stored: ") == 2
    assert "prompts.jsonl, line 3, sample 0" in error
    assert "prompts.jsonl, line 3, sample 1" in error
    assert "(3 responses refused)" in error
    assert "Traceback" not in error
    store = RolloutStore([folder / "store"])
    assert {*store.column("group").tolist()} == {100, 101, 103, 104}
    with engine() as server:
        assert collect(server.url, 2) == 0
        assert server.asked.total() == 2
    check_store(folder / "store", 5, 2)


def test_what_will_not_pass_is_not_asked_again(folder, capsys):
    def behave(body, nth):
        return "400" if body.get("prompt") == list(PROMPTS[1]) else "ok"

    with engine(behave) as server:
        assert collect(server.url, 1) == 1
        assert {*server.asked.values()} == {1}
    error = capsys.readouterr().err
    assert "line 2, sample 0: " in error
    assert "HTTP 400: told to say 400" in error


def test_a_server_that_answers_nothing_is_left_alone(folder, capsys):
    write_inputs(folder, 40)
    with engine(lambda body, nth: "zeros" if nth else "ok") as server:
        assert collect(server.url, 2, "--concurrency", "2") == 1
        assert server.asked.total() < 60
    error = capsys.readouterr().err
    assert "error: 8 prompts in a row gave no rollout; store has 0 of 80 rollouts" in error
    assert not (folder / "store").exists()


def test_no_server(folder, capsys):
    assert collect("http://127.0.0.1:9", 1, "--retries", "1") == 1
    error = capsys.readouterr().err
    assert "error: http://127.0.0.1:9/version: " in error
    assert "(2 tries)" in error
    assert not (folder / "store").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "ftp://x"], "must begin with http"),
        (
            ["--url", "http://127.0.0.1:99999"],
            "http://127.0.0.1:99999: this is no address (Port out",
        ),
        (["--url", "http://127.0.0.1:x"], "http://127.0.0.1:x: this is no address (Invalid URL"),
        (["--url", "http://127.0.0.1?a=b"], "leave ? and # out"),
        (["--url", "http://"], "must begin with http"),
        (["--url", "http://a..b"], "http://a..b"),
        (["--url", "http://" + "a" * 70], "aaa"),
        (["--url", "http://x\x1b[2J"], "http://x\\x1b[2J"),
        (["--reward", "rewards"], "module:function"),
        (["--reward", "rewards:none"], "AttributeError"),
        (["--reward", "no_such_module:f"], "ModuleNotFoundError"),
        (["--reward", "rewards:__doc__"], "not a function"),
        (["--reward", "exits:f"], "--reward exits:f: SystemExit: 3"),
        (["--reward", "lines:f"], "--reward lines:f: ValueError: one two\\x1b[2J"),
        (["--model", "none.json"], "none.json: not a readable model config"),
        (["--model", "deep.json"], "deep.json: JSON with more than 64 brackets"),
        (["--model", "words.json"], "words.json: `vocab_size` must be a whole number; got"),
        (["--prompts", "deep.json"], "deep.json, line 1: JSON with more than 64 brackets"),
        (["--prompts", "bytes.json"], "bytes.json, line 1: not JSON"),
        (["--prompts", "half.json"], "half.json, line 1: the prompt cannot be sent as JSON"),
        (["--prompts", "none.jsonl"], "none.jsonl: not readable"),
    ],
)
def test_wrong_arguments(folder, capsys, arguments, message):
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "words.json").write_text(json.dumps({**CONFIG, "vocab_size": "many\n"}))
    (folder / "bytes.json").write_bytes(b'{"prompt": "\xff"}')
    (folder / "half.json").write_text('{"prompt": "\\ud800"}')
    (folder / "exits.py").write_text("import sys\nsys.exit(3)\n")
    (folder / "lines.py").write_text("raise ValueError('one\\ntwo\\x1b[2J')\n")
    assert main([*command("http://127.0.0.1:9", 1, "--retries", "0"), *arguments]) == 1
    *_, error = captured = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert len(captured) <= 2
    assert error.isprintable()


@pytest.mark.parametrize(
    "url",
    [
        "http://me:s3cret@127.0.0.1:9",
        "http://me:s3cret@127.0.0.1:99999",
        "http://me:s3cret@127.0.0.1:x",
        "http://me:s3#cret@127.0.0.1:9",
        "http://me:s3/cret@127.0.0.1:9",
        "http://me:s3@cret@127.0.0.1:9",
        "ftp://me:s3cret@127.0.0.1",
        "me:s3cret@127.0.0.1",
        "//me:s3cret@127.0.0.1",
        "http://me:s3cret@127.0.0.1?a#b",
        "http://me:s3cret\n@127.0.0.1:9",
    ],
)
def test_a_password_is_never_shown(folder, capsys, url):
    assert main(command(url, 1, "--retries", "0")) == 1
    error = capsys.readouterr().err.splitlines()
    assert error[-1].startswith("error: ")
    assert "127.0.0.1" in error[-1]
    assert not [line for line in error if "s3" in line or "cret" in line]


def test_a_password_reaches_the_server(folder, capsys):
    def refuse(body):
        return Raw([b'{"detail": "no"}'], status=400)

    with engine() as server:
        secret = server.url.replace("http://", "http://me:s3%40cret@")
        assert main(command(secret, 1)) == 0
        me = "Basic " + base64.b64encode(b"me:s3@cret").decode()
        assert {*server.authorized} == {("GET", me), ("POST", me)}
        server.answer = refuse
        assert main(command(secret, 2)) == 1
    output = "".join(capsys.readouterr())
    assert "HTTP 400: no" in output
    assert "cret" not in output


FAILING_REWARDS = [
    ("wrong", "raised KeyError"),
    ("nothing", "returned None; a reward is a number"),
    ("exits", "raised SystemExit: 3"),
    ("cancels", "raised CancelledError"),
    ("stops", "raised StopIteration"),
    ("lines", "raised ValueError: one two\\x1b[2J"),
    ("infinite", "returned inf; a reward is finite"),
    ("pair", "returned array([1, 2]); a reward is a number"),
]


@pytest.mark.parametrize(("function", "what"), FAILING_REWARDS)
def test_a_failing_reward_names_the_prompt_and_loses_nothing(folder, capsys, function, what):
    (folder / "rewards.py").write_text(
        f"import rewards_\ndef some(sample):\n"
        f"    f = rewards_.{function} if sample.group == 103 else rewards_.length\n"
        f"    return f(sample)\n"
    )
    (folder / "rewards_.py").write_text(REWARD)
    with engine() as server:
        assert collect(server.url, 2, "--reward", "rewards:some", "--concurrency", "1") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: prompts.jsonl, line 4, sample 0: the reward rewards:some")
    assert what in error
    assert error.isprintable()
    assert len(RolloutStore([folder / "store"])) == 6


@pytest.mark.parametrize("out", ["afile", "afile/store", "/proc/store"])
def test_an_out_that_cannot_be_written(folder, capsys, out):
    (folder / "afile").write_text("mine")
    with engine() as server:
        assert main(command(server.url, 1, "--out", out)) == 1
        assert not server.asked
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 2
    assert error[1].startswith(f"error: --out {out}: nothing can be written there (")
    assert error[1].endswith("); give a directory of your own, or a new name")
    assert (folder / "afile").read_text() == "mine"


FULL_DISK = """
import resource
from engine_rewards import length
def some(sample):  # from group 103 on no file may have more than 4 KB
    if sample.group == 103:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    return length(sample)
"""


def test_a_full_disk_is_one_line_and_loses_no_shard(folder):
    (folder / "rewards.py").rename(folder / "engine_rewards.py")
    (folder / "rewards.py").write_text(FULL_DISK)
    with engine() as server:
        arguments = command(server.url, 4, "--reward", "rewards:some", "--shard-size", "8")
        done = subprocess.run(
            [sys.executable, "-m", "megatron_r3.cli", *arguments, "--concurrency", "1"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1
        assert done.stderr.splitlines()[1:] == [
            "error: store: no shard can be written (File too large): 8 rollouts are not stored; "
            "make room or repair the disk, then run the same command again"
        ]
        assert len(RolloutStore([folder / "store"])) == 8
        assert leftovers(folder / "store") == []
        (folder / "rewards.py").write_text((folder / "engine_rewards.py").read_text())
        assert collect(server.url, 4) == 0
    check_store(folder / "store", 6, 4)


def test_two_collections_at_a_time_are_refused(folder, capsys):
    refused = threading.Event()

    def behave(body, nth):
        if "path" not in body:  # a request for a rollout
            refused.wait(60)  # the first collection lasts until the second one was refused
        return "ok"

    with engine(behave) as server:
        with subprocess.Popen(
            [sys.executable, "-m", "megatron_r3.cli", *command(server.url, 4)],
            stdout=subprocess.PIPE,
        ) as other:
            while not (folder / "store" / ".collect.lock").exists():
                time.sleep(0.01)
            assert collect(server.url, 4) == 1
            assert "store: another collection writes to it" in capsys.readouterr().err
            refused.set()
            other.communicate()
            assert other.returncode == 0
        assert {*server.asked.values()} == {1}
    check_store(folder / "store", 6, 4)


def test_a_group_larger_than_a_shard_is_stored_in_parts(folder):
    write_inputs(folder, 1)
    with engine() as server:
        assert collect(server.url, 20, "--shard-size", "6") == 0
    assert [s.num_rollouts for s in RolloutStore([folder / "store"]).shards] == [6, 6, 6, 2]
    check_store(folder / "store", 1, 20)


def test_the_command_line_starts_without_torch():
    code = "import sys; from megatron_r3.cli import main; main(['rl']); main(['rollouts']); "
    code += "print(sorted({'torch', 'aiohttp', 'numpy', 'plotly'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
