"""Tries on prompt files: JSON lines with other types, other groups, noise, and lines without JSON.

`meant` is a second reader of prompt files, written from the docs without the code under test.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

from megatron_r3.collect.prompts import read_prompts
from proof.fuzz.damage import TEXTS, damage, noise, odd
from proof.fuzz.driver import Kind
from proof.fuzz.outcome import judged, note

_LINES = (
    *TEXTS, '{"prompt": "a", "messages": []}', '{"prompt": "a", "prompt": [1]}',
    '{"prompt": "\\ud800"}', '{"prompt": "a"} {"prompt": "b"}', '{"prompt": "\u2028"}',
    '{"prompt": "a"}\r', '{"prompt": [' + "9" * 5000 + "]}",
)  # fmt: skip
_TOKENS = (-1, 2**31, 2**70, 1.0, True, None, "3", [3], 2**31 - 1)
_ENCODINGS = ("utf-16", "utf-32", "utf-8-sig", "latin-1")


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


def attempt(rng: random.Random, folder: Path, state: None) -> str:
    """Write a file of prompts, damaged in most tries, and read it."""
    lines = [_line(rng, number) for number in range(rng.randint(1, 6))]
    path = folder / "prompts.jsonl"
    kind = rng.choice(("nothing", *["damage"] * 6, "line", "line", *["noise"] * 3, "no file"))
    said = _change(lines, rng) if kind == "damage" else kind
    texts = [json.dumps(line).encode() for line in lines]
    if kind == "line":
        texts.insert(rng.randrange(len(texts) + 1), rng.choice(_LINES).encode())
    data = rng.choice((b"\n", b"\n\n", b"\r\n")).join(texts) + rng.choice((b"", b"\n", b" \n\t"))
    if kind == "noise":
        data, said = _noise(data, rng)
    path.write_bytes(data)
    if kind == "no file":
        said = _no_file(path, rng)
    note(folder, f"{said}: {data[:500]!a}")
    expected = meant(path.read_bytes()) if path.is_file() else None

    def difference(got: list[Any]) -> str | None:
        if expected is None:
            return f"accepted, but this is no file of prompts: {str(got)[:200]!a}"
        if repr(got) != repr(expected):  # NaN != NaN, but both print as nan
            return f"{str(got)[:300]!a}, not {str(expected)[:300]!a}"
        return None

    return judged(lambda: _read(path), difference, [str(path)], must=kind == "nothing")


def _read(path: Path) -> list[tuple[int, Any, Any]]:
    prompts = read_prompts(path)
    for prompt in prompts:
        assert prompt.where.startswith(str(path))
        _ = prompt.digest  # must not raise: a collection stores the digest of every prompt
        assert (prompt.tokens is None) == (isinstance(prompt.content, str) or prompt.is_chat)
    return [(prompt.group, prompt.content, dict(prompt.fields)) for prompt in prompts]


def meant(data: bytes) -> list[tuple[int, Any, Any]] | None:
    """What a file means: group, content and fields of each prompt.

    None means that the file is wrong: it has no prompt, a line that is no prompt, or two prompts of
    the same group.
    """
    # without `group` and `id` the group is the number of the line, from 0, empty lines counted
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
    kind = rng.choice(("damage", "damage", "damage", "both", "twice", "token", "group"))
    if kind == "damage":
        return damage(line, rng)
    if kind == "both":
        line |= {"prompt": [1], "messages": [{"role": "user"}]}
    elif kind == "twice":
        lines.append(dict(line))
    elif kind == "token" and isinstance(line.get("prompt"), list):
        line["prompt"][rng.randrange(len(line["prompt"]))] = rng.choice(_TOKENS)
    else:
        line[rng.choice(("group", "id"))] = odd(rng)
    return kind


def _noise(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    name = rng.choice(("", "", "", *_ENCODINGS))
    if not name:
        return noise(data, rng)
    return data.decode(errors="replace").encode(name, "replace"), f"as {name}"


def _no_file(path: Path, rng: random.Random) -> str:
    path.unlink()
    kind = rng.choice(("missing", "folder", "link", "empty"))
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(path.name)
    elif kind == "empty":
        path.write_bytes(b"")
    return f"no file, {kind}"


KIND = Kind("prompts", attempt)
