"""Bodies of servers that mean harm: read within bounds, and never a traceback."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from engine_server import PAGES, Raw, command, engine, write_inputs

from megatron_r3.cli import main
from megatron_r3.collect.prompt_plan import Sampling
from megatron_r3.collect.prompts import Prompt
from megatron_r3.collect.requests import answer_limit
from megatron_r3.data.engines.shape import ModelShape
from megatron_r3.data.untrusted import read_json

MB = 1 << 20
# a process has its own high-water mark; getrusage's begins with that of the process it was forked
# from
MEASURED = """
import sys
from megatron_r3.cli import main
code = main(sys.argv[1:])
print("torch" in sys.modules)
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
sys.exit(code)
"""


def test_the_limit_follows_what_was_asked():
    shape = ModelShape(128, 8, tuple(range(48)), 48)
    asked = Prompt("line 1", 0, [1] * 1000, {})
    limit = answer_limit(shape, asked, Sampling(1024))
    as_lists = 2023 * 48 * 8 * len("127, ")  # routes at their longest
    as_base64 = 2023 * 48 * 8 * 4 / 3
    assert as_lists < limit < 20 * as_base64
    assert answer_limit(shape, asked, Sampling(2048)) > limit
    cut = Sampling(1024, top_k=50, logprobs_of="processed")
    masks = 1024 * 50 * len("2147483647, ")
    assert limit + masks < answer_limit(shape, asked, cut) < limit + 3 * masks
    text = Prompt("line 1", 0, "\u20ac" * 1000, {})  # of up to 3 tokens each
    assert answer_limit(shape, text, Sampling(1024)) > answer_limit(
        shape, Prompt("", 0, [1] * 3000, {}), Sampling(1024)
    )
    tiny = answer_limit(
        ModelShape(16, 4, (0, 1, 2, 3), 4), Prompt("", 0, [1] * 12, {}), Sampling(1024)
    )
    assert tiny < 3 * MB


@pytest.mark.parametrize(
    ("text", "deep"),
    [
        ("[" * 65, True),
        ("[" * 64 + "]" * 64, False),
        ('["' + "[" * 99 + '"]', False),  # brackets of a text
        ('["' + '\\"[' * 99 + '"]', False),  # behind an escaped quote they are text, too
        ('["\\\\", ' + "[" * 64, True),  # an escaped backslash escapes no quote
        ('["a\\\\\\"' + "[" * 99 + '"]', False),
        ("[[]," * 99 + "1" + "]" * 99, True),
        ("[" + "[]," * 99 + "1]", False),
    ],
)
def test_depth_of_json(text, deep):
    if deep:
        with pytest.raises(ValueError, match="a body: JSON with more than 64 brackets"):
            read_json(text, "a body")
    else:
        assert read_json(text, "a body") == json.loads(text)


@pytest.fixture
def folder(empty_folder):
    write_inputs(empty_folder, 32)
    return empty_folder


def endless() -> Iterator[bytes]:
    return itertools.repeat(b'{"a": [' * 9000)


def nested(many: int) -> bytes:
    """Small on the wire, large as Python's objects, and inside the limit."""
    return b'{"choices": [' + b",".join([b"[]"] * many) + b"]}"


BOMB = gzip.compress(bytes(64 * MB))
HOSTILE = {
    "bomb": lambda: Raw([BOMB], {"Content-Encoding": "gzip"}),
    "quotes": lambda: Raw([b"[" * 70 + b'"' + b'\\"' * MB]),
    "endless": lambda: Raw(endless()),
    "ten gigabytes": lambda: Raw(endless(), {"Content-Length": str(10**10)}),
    "objects": lambda: Raw([nested(700_000)]),
    "refusal": lambda: Raw(endless(), status=400),
    "not found": lambda: Raw(endless(), status=503),
}


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("how", HOSTILE)
def test_memory_of_32_hostile_bodies(folder, how):
    with engine(answer=lambda body: HOSTILE[how]()) as server:
        arguments = command(server.url, 1, "--retries", "0", "--refused-retries", "0")
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, *arguments], capture_output=True, text=True
        )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "prompts in a row gave no rollout" in done.stderr.splitlines()[-1]
    with_torch, kilobytes = done.stdout.split()
    assert with_torch == "False"
    assert int(kilobytes) < 512 * 1024
    assert not (folder / "store").exists()


@pytest.mark.parametrize(
    ("page", "raw", "message"),
    [
        ("/version", lambda: Raw(endless()), "/version: the body has more than 4194304 bytes; an "),
        ("/v1/models", lambda: Raw([b"[" * 9999]), "/v1/models: JSON with more than 64 brackets"),
        ("/version", lambda: Raw(["x"], {"Content-Length": str(10**10)}), "has 10000000000 bytes"),
        ("/version", lambda: Raw([BOMB], {"Content-Encoding": "gzip"}), "the encoding 'gzip', tho"),
        ("/version", lambda: Raw([BOMB], {"Content-Encoding": "br\x1b"}), "the encoding 'br"),
        ("/version", lambda: Raw([b"\xff"]), "/version: not JSON"),
        ("/version", lambda: {"version": "1" * 1_000_000}, "version must be a text of at most 200"),
        ("/version", lambda: {"version": "1\x1b[31m"}, "version must be a text without control"),
        ("/version", lambda: {"version": ["1"]}, "version must be a text; got list"),
        ("/version", lambda: ["0.30.0"], "/version: no vllm server has such a page"),
        ("/v1/models", lambda: {"data": []}, "/v1/models: no vllm server has such a page"),
        ("/v1/models", lambda: {"data": [{"id": "a\nb"}]}, "model must be a text without control"),
    ],
)
def test_pages_that_no_engine_has(folder, capsys, page, raw, message):
    with engine(pages={**PAGES, page: raw()}) as server:
        assert main(command(server.url, 1)) == 1
        assert not server.asked
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 2
    assert error[1].startswith("error: http://127.0.0.1:")
    assert message in error[1]
    assert len(error[1]) < 1000
    assert error[1].isprintable()


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b'{"choices": ' + b'[{"index": 0, "a": ' * 70 + b"1" + b"}]" * 70 + b"}",
        b'{"choices": [{"index": 0}], "n": ' + b"9" * 5000 + b"}",
        b'{"choices": [{"index": 0, "message": ["x"]}]}',
        b'"text"',
        b"null",
    ],
)
def test_json_of_somebody_else_is_one_line_each(folder, capsys, data):
    write_inputs(folder, 2)
    with engine(answer=lambda body: Raw([data])) as server:
        assert main(command(server.url, 1, "--refused-retries", "0")) == 1
    error = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in error[1:]] == ["not stored", "not stored", "error"]
    assert all(line.isprintable() for line in error)


def test_what_a_server_says_is_one_printable_line(folder, capsys):
    write_inputs(folder, 1)
    text = json.dumps({"error": {"message": "one\r\ntwo\x1b[2J\u202e"}}).encode()
    with engine(answer=lambda body: Raw([text], status=400)) as server:
        assert main(command(server.url, 1)) == 1
    error = capsys.readouterr().err.splitlines()
    assert error[1].endswith("HTTP 400: one two\\x1b[2J\\u202e")
    assert len(error) == 3
    assert all(line.isprintable() for line in error)
