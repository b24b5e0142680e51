"""Bodies of servers that mean harm: bounded, decompressed within bounds, and never a traceback."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import subprocess
import sys
import zlib
from collections.abc import Iterator

import pytest
from engine_server import PAGES, Raw, answer, command, engine, write_inputs

from megatron_r3.cli import main
from megatron_r3.collect.http_body import CutShort, answer_limit, beginning_of, body_of
from megatron_r3.collect.prompt_plan import Sampling
from megatron_r3.collect.prompts import Prompt
from megatron_r3.data.engines.shape import EngineError, ModelShape

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


class Answer:
    """What is used of an httpx.Response."""

    def __init__(self, data: bytes, encoding: str = "", length: str = "", piece: int = 7) -> None:
        self.headers = {"content-encoding": encoding, "content-length": length}
        self.data, self.piece, self.sent = data, piece, 0

    async def aiter_raw(self):
        for start in range(0, len(self.data), self.piece):
            self.sent += 1
            yield self.data[start : start + self.piece]


def read(answer: Answer, most: int) -> bytes:
    return bytes(asyncio.run(body_of(answer, most)))


def raw_deflate(data: bytes) -> bytes:
    squeeze = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return squeeze.compress(data) + squeeze.flush()


TEXT = json.dumps({"numbers": list(range(300))}).encode()
ENCODINGS = {
    "": bytes,
    "identity": bytes,
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    " Deflate ": raw_deflate,
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("piece", [1, 7, 100_000])
def test_every_encoding_that_servers_send(encoding, piece):
    data = ENCODINGS[encoding](TEXT)
    assert read(Answer(data, encoding, piece=piece), len(TEXT)) == TEXT
    with pytest.raises(EngineError, match=f"takes {len(TEXT) - 1} at most"):
        read(Answer(data, encoding, piece=piece), len(TEXT) - 1)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_what_is_not_in_its_encoding(encoding):
    whole = ENCODINGS[encoding](TEXT)
    with pytest.raises(CutShort, match="ended inside"):
        read(Answer(whole[:-9], encoding), MB)
    with pytest.raises(CutShort, match="ended inside"):
        read(Answer(b"", encoding), MB)
    with pytest.raises(EngineError, match=f"not {encoding}"):
        read(Answer(b"<html>" * 20, encoding), MB)
    with pytest.raises(EngineError, match="after the end"):
        read(Answer(whole + b"more", encoding, piece=10_000), MB)


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "\x1b[31m"])
def test_other_encodings_are_refused_by_name(encoding):
    with pytest.raises(EngineError, match="expected identity, gzip or deflate") as error:
        read(Answer(TEXT, encoding), MB)
    assert repr(encoding).strip("'").replace("\\x1b", "x1b")[:4] in str(error.value)
    assert str(error.value).isprintable()


def test_a_length_above_the_limit_is_not_read_at_all():
    answer = Answer(TEXT, length=str(10**10))
    with pytest.raises(EngineError, match="10000000000 bytes"):
        read(answer, MB)
    assert answer.sent == 0


def test_a_bomb_is_left_at_the_limit():
    answer = Answer(gzip.compress(bytes(64 * MB)), "gzip", piece=100)
    with pytest.raises(EngineError, match="does not end"):
        read(answer, MB)
    assert answer.sent * 100 < 2500  # of 65,000 bytes: 1 MB of zeros is 1 KB


def test_the_beginning_of_a_refusal():
    assert asyncio.run(beginning_of(Answer(b"x" * 5000), 100)) == b"x" * 100
    assert asyncio.run(beginning_of(Answer(gzip.compress(TEXT), "gzip"), MB)) == TEXT
    assert asyncio.run(beginning_of(Answer(TEXT, "br"), MB)) == b""


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


@pytest.fixture
def folder(empty_folder):
    write_inputs(empty_folder, 32)
    return empty_folder


def endless() -> Iterator[bytes]:
    return itertools.repeat(b'{"a": [' * 9000)


def bomb() -> bytes:
    """300 MB of JSON brackets in 0.3 MB of gzip."""
    squeeze = zlib.compressobj(1, wbits=16 + zlib.MAX_WBITS)
    return b"".join([squeeze.compress(b"[" * MB) for _ in range(300)]) + squeeze.flush()


def nested(many: int) -> bytes:
    """Small on the wire, large as Python's objects, and inside the limit."""
    return b'{"choices": [' + b",".join([b"[]"] * many) + b"]}"


BOMB = bomb()
HOSTILE = {
    "bomb": lambda: Raw([BOMB], {"Content-Encoding": "gzip"}),
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
        ("/version", lambda: Raw(endless()), "/version: the body does not end; what was asked for"),
        ("/v1/models", lambda: Raw([b"[" * 9999]), "/v1/models: JSON with more than 64 brackets"),
        ("/version", lambda: Raw([b"\xff"]), "/version: not JSON"),
        ("/version", lambda: {"version": "1" * 1_000_000}, "version must be a text of at most 200"),
        ("/version", lambda: {"version": "1\x1b[31m"}, "version must be a text without control"),
        ("/version", lambda: {"version": ["1"]}, "version must be a text; got list"),
        ("/version", lambda: ["0.30.0"], "/version: not what vllm answers"),
        ("/v1/models", lambda: {"data": []}, "/v1/models: not what vllm answers"),
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


@pytest.mark.parametrize("field", ["text", "finish_reason", "message"])
def test_a_response_whose_text_is_none(folder, capsys, field):
    write_inputs(folder, 1)

    def odd(body):
        response = answer(body)
        return {**response, "choices": [{**response["choices"][0], field: ["\x1b[31m"]}]}

    with engine(answer=odd) as server:
        assert main(command(server.url, 1, "--refused-retries", "0")) == 1
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 3
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
