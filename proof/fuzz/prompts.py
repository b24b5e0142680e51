"""Tries on prompt files: JSON lines with other types, other groups, noise, and lines without JSON.

What a line means is worked out a second time here (`meant`), after the docs and without the code
under test.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from pathlib import Path
from typing import Any

from megatron_r3.collect.prompts import read_prompts
from proof.fuzz.outcome import Kind, Verdict, judged, note

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 2**70, 10**400, 1.5, 3.0, math.nan,
    math.inf, "", "a", "7", "\x1b[2J", "\ud800", "\u202ea", "a\nb", [], {}, [[]], [None], [1, "a"],
    [-1], [2**31], [True], [1.0], [{}], [{"role": "user"}, 3], {"a": 1}, "x" * 10_000, [0] * 5000,
]  # fmt: skip
_LINES = (
    "{", "}", "null", "3", '"a"', "[]", "{}", "\ufeff{}", "NaN", '{"prompt"}', "[" * 100_000,
    '{"prompt": ' * 50_000, '{"prompt": [' + "9" * 5000 + "]}", '{"prompt": "a", "messages": []}',
    '{"prompt": "\\ud800"}', '{"prompt": "a"} {"prompt": "b"}', "{'prompt': 'a'}", "\x1b[2J", "\0",
    '{"prompt": "a", "prompt": [1]}', '{"prompt": "\u2028"}', '{"prompt": "a"}\r', "\x0b\x0c",
)  # fmt: skip


def prepare(shared: Path) -> None:
    """Prepare nothing: every try writes its own prompts."""


def _line(rng: random.Random, number: int) -> dict[str, Any]:
    kind = rng.choice(("ids", "ids", "text", "chat"))
    line: dict[str, Any] = {"answer": rng.choice(("42", 42, None, {"a": [1]}))}
    if kind == "chat":
        line["messages"] = [{"role": "user", "content": "What is 6 times 7?"}]
    else:
        ids = [rng.randrange(64) for _ in range(rng.randint(1, 9))]
        line["prompt"] = ids if kind == "ids" else "What is 6 times 7?"
    name = rng.choice((None, "group", "id", "text id"))
    if name is not None:
        named = f"q{number}" if name == "text id" else 1000 + number
        line[name.removeprefix("text ")] = named
    return line


def attempt(rng: random.Random, folder: Path, state: None) -> Verdict:
    """Write a file of prompts with something wrong in it, and read it."""
    lines = [_line(rng, number) for number in range(rng.randint(1, 6))]
    path = folder / "prompts.jsonl"
    chance = rng.random()
    must, change = False, "nothing is changed"
    if chance < 0.05:
        must = True
    elif chance < 0.5:
        change = _change(lines, rng)
    texts = [json.dumps(line) for line in lines]
    if 0.5 <= chance < 0.7:
        text = rng.choice(_LINES)
        texts.insert(rng.randrange(len(texts) + 1), text)
        change = f"odd line: {text!a:.60}"
    data = rng.choice(("\n", "\n\n", "\r\n")).join(texts).encode(errors="surrogatepass")
    data += rng.choice((b"", b"\n", b" \n\t"))
    if chance >= 0.7:
        data, change = _noise(data, rng)
    note(folder, change)
    path.write_bytes(data)
    if chance >= 0.97:
        change = _no_file(path, rng)
        note(folder, change)
    expected = meant(data) if path.is_file() else None

    def difference(got: list[tuple[int, Any, Any]]) -> str | None:
        if expected is None:
            return f"accepted, and it is no file of prompts: {str(got)[:200]!a}"
        if repr(got) != repr(expected):  # NaN != NaN, but both print as nan
            return f"{str(got)[:300]!a}, not {str(expected)[:300]!a}"
        return None

    return judged(lambda: _read(path), difference, [str(path)], must)


def _read(path: Path) -> list[tuple[int, Any, Any]]:
    prompts = read_prompts(path)
    for prompt in prompts:
        assert prompt.where.startswith(str(path))
        _ = prompt.digest  # a collection stores the digest, which must exist for every prompt
        assert (prompt.tokens is None) == (isinstance(prompt.content, str) or prompt.is_chat)
    return [(prompt.group, prompt.content, dict(prompt.fields)) for prompt in prompts]


def meant(data: bytes) -> list[tuple[int, Any, Any]] | None:
    """Group, content and fields of each prompt.

    None means that the file is wrong: there is no prompt in it, a line is no prompt, or two prompts
    have the same group.
    """
    by_group: dict[int, tuple[int, Any, Any]] = {}
    for number, line in enumerate(data.split(b"\n")):
        if not line.strip():
            continue
        try:
            fields = json.loads(line.decode())
            group = _group(fields, number)
            content = fields.get("prompt", fields.get("messages"))
        except (ValueError, RecursionError, AttributeError, TypeError):
            return None
        of_one = ("prompt" in fields) + ("messages" in fields) == 1
        if not of_one or not _is_content(content, "messages" in fields) or group in by_group:
            return None
        by_group[group] = (group, content, fields)
    return [*by_group.values()] or None


def _is_content(content: Any, chat: bool) -> bool:
    if isinstance(content, str):
        return bool(content) and not chat
    if not isinstance(content, list) or not content:
        return False
    if chat:
        return all(isinstance(message, dict) for message in content)
    return all(type(token) is int and 0 <= token < 2**31 for token in content)


def _group(fields: dict[str, Any], number: int) -> int:
    named = fields.get("group")
    if named is None:
        named = fields.get("id")
        if isinstance(named, str):
            data = named.encode(errors="surrogatepass")
            return int.from_bytes(hashlib.sha256(data).digest()[:8], "big") >> 1
    if named is None:
        return number
    if type(named) is not int or not -(2**63) <= named < 2**63:
        raise ValueError
    return named


def _change(lines: list[dict[str, Any]], rng: random.Random) -> str:
    line = rng.choice(lines)
    kind = rng.choice(("typed", "typed", "typed", "missing", "both", "twice", "token", "group"))
    if kind == "typed":
        name = rng.choice([*line])
        line[name] = rng.choice(ODD)
        return f"typed: {name} {line[name]!a:.60}"
    if kind == "missing":
        del line[rng.choice([*line])]
    elif kind == "both":
        line |= {"prompt": [1], "messages": [{"role": "user"}]}
    elif kind == "twice":
        lines.append(dict(line))
    elif kind == "token" and isinstance(line.get("prompt"), list):
        where = rng.randrange(len(line["prompt"]))
        line["prompt"][where] = rng.choice((-1, 2**31, 2**70, 1.0, True, None, "3", [3], 2**31 - 1))
    else:
        line[rng.choice(("group", "id"))] = rng.choice(ODD)
    return kind


def _noise(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    changed = bytearray(data)
    where = rng.randrange(len(data))
    kind = rng.choice(("flip", "byte", "cut", "delete", "insert", "encoding"))
    if kind == "flip":
        changed[where] ^= 1 << rng.randrange(8)
    elif kind == "byte":
        changed[where] = rng.choice((0, 0x1B, 0x22, 0x7F, 0x80, 0xC0, 0xFF))
    elif kind == "cut":
        del changed[where:]
    elif kind == "delete":
        del changed[where : where + rng.randint(1, 9)]
    elif kind == "insert":
        changed[where:where] = rng.randbytes(rng.randint(1, 9))
    else:
        name = rng.choice(("utf-16", "utf-32", "utf-8-sig", "latin-1"))
        changed = bytearray(data.decode(errors="replace").encode(name, "replace"))
    return bytes(changed), f"noise, {kind}"


def _no_file(path: Path, rng: random.Random) -> str:
    path.unlink()
    kind = rng.choice(("missing", "folder", "link", "empty"))
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(path.name)
    elif kind == "empty":
        path.write_bytes(b"")
        return "no file, empty"
    return f"no file, {kind}"


KIND = Kind("prompts", 80, 30.0, 512, prepare, attempt)
