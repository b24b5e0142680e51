"""Bodies with something wrong: values of other types, lists cut and shuffled, bytes changed."""

from __future__ import annotations

import base64
import copy
import random
from typing import Any

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 5, 16, 255, 40000, 2**31, 2**63, -(2**70), 10**400, 0.0, 1.5,
    float("nan"), float("inf"), "", "a", "AAAA", "ndarray", "int64", "float32", "\ud800", [], {},
    [[]], [[[]]], [None], [1, [2]], [[1], [2, 3]], {"data": [], "dtype": "int16"}, "k05VTVBZ",
    ["ndarray", {"data": [[[1]]], "dtype": "int16"}], [[[0] * 4] * 3] * 9, "a" * 3000,
]  # fmt: skip


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Paths of everything in a body; of a long list the ends and a few between."""
    found = [path]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += places(inner, (*path, key))
    elif isinstance(value, list):
        for i in sorted({0, 1, len(value) // 2, len(value) - 1} & set(range(len(value)))):
            found += places(value[i], (*path, i))
    return found


def at(value: Any, path: tuple) -> Any:
    for key in path:
        value = value[key]
    return value


def changed_bytes(text: str, rng: random.Random) -> str:
    """Base64 of bytes that were flipped, cut, doubled or moved; or broken base64."""
    try:
        raw = bytearray(base64.b64decode(text, validate=True))
    except ValueError:
        raw = bytearray(text.encode("utf-8", "replace"))
    kind = rng.randrange(7)
    where = rng.randrange(len(raw) or 1)
    if kind == 0 and raw:
        raw[where] = rng.choice((0, 15, 16, 255, rng.randrange(256), rng.randrange(16)))
    elif kind == 1:
        del raw[where:]
    elif kind == 2:
        raw += raw[where : where + rng.choice((1, 4, 64))]
    elif kind == 3:
        del raw[where : where + rng.choice((1, 4, 16, 80))]
    elif kind == 4:
        raw[where:where] = bytes(rng.choice((1, 4, 80)))
    elif kind == 5:  # two rows change places
        a, b = (rng.randrange(max(1, len(raw) // 4)) * 4 for _ in range(2))
        raw[a : a + 4], raw[b : b + 4] = raw[b : b + 4], raw[a : a + 4]
    else:
        broken = list(text)
        if broken:
            broken[rng.randrange(len(broken))] = rng.choice("=!A \n\u00e9")
        return "".join(broken)
    return base64.b64encode(bytes(raw)).decode()


def _change_list(values: list[Any], rng: random.Random) -> None:
    kind = rng.randrange(4)
    if kind == 0:
        values.pop()
    elif kind == 1:
        values.append(values[0])
    elif kind == 2:
        values.reverse()
    else:
        rng.shuffle(values)


def mutated(body: Any, rng: random.Random) -> Any:
    body = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        paths = [path for path in places(body) if path]
        if not paths:
            break
        *parents, last = rng.choice(paths)
        parent = at(body, tuple(parents))
        old = parent[last]
        if isinstance(old, str) and rng.random() < 0.7:
            parent[last] = changed_bytes(old, rng)
        elif isinstance(old, list) and old and rng.random() < 0.5:
            _change_list(old, rng)
        elif isinstance(parent, dict) and rng.random() < 0.2:
            del parent[last]
        else:
            parent[last] = copy.deepcopy(rng.choice(ODD))
    return body


def mutated_json(value: Any, rng: random.Random) -> Any:
    """What JSON can hold, some of it of other types, sizes and depths."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 4))):
        paths = [path for path in places(value) if path]
        *parents, last = rng.choice(paths)
        parent = at(value, tuple(parents))
        kind = rng.randrange(8)
        if kind == 0 and isinstance(parent, dict) and len(paths) > 1:
            del parent[last]
        elif kind == 1:
            parent[last] = copy.deepcopy(at(value, rng.choice(paths)))  # of another field
        elif kind == 2:
            parent[last] = rng.choice((2**31, 2**32, 4 * 10**9, 10**19, -1, 1e300, 10001, 32769))
        elif kind == 3:
            parent[last] = nested(rng.choice((3, 60, 70)), rng)
        elif kind == 4 and isinstance(parent[last], list) and parent[last]:
            _change_list(parent[last], rng)
        else:
            parent[last] = copy.deepcopy(rng.choice(ODD))
    return value


def nested(depth: int, rng: random.Random) -> Any:
    """Lists or objects inside each other."""
    value: Any = rng.choice((1, "a", None))
    for _ in range(depth):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value
