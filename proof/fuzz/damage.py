"""Odd values, damaged bytes and damaged JSON, which several classes of tries share."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

NUMBERS = (
    0, 1, -1, 3, 5, 20_000, 2**31, 4_000_000_000, 2**63, -(2**63), 2**70, 10**400, 0.0, 1.5, 4.0,
    math.nan, math.inf, True, False,
)  # fmt: skip
ODD: list[Any] = [
    None, "", "a", "7", "AAAA", "k05VTVBZ", "\x1b[2J", "\ud800", "\u202ea", "a\nb", "x" * 5000, [],
    {}, [[]], [[[]]], [None], [1, "a"], [1, [2]], [[1], [2, 3]], [-1], [2**31], [4_000_000_000],
    [True], [1.5], [{}], {"a": 1}, {"a": {"b": 1}}, [0, 1, 0, 1], [{"role": "user"}, 3], [3] * 400,
    ["sparse"] * 4, ["dense"] * 4, [None] * 4, ["\x1b[2J"] * 4, {"data": [], "dtype": "int16"},
    [[[0] * 4] * 3] * 9, {"message": "no\nroom\x1b[2J"}, {"type": "abort"},
]  # fmt: skip
# texts: most are no JSON; the others are JSON that no reader here expects
TEXTS = (
    "", "{", "}", "null", "3", '"a"', "[]", "{}", "[null]", "\ufeff{}", "NaN", "\0", "\x1b[2J",
    "{'a': 1}", '{"a"}', "[" * 100_000, '{"a":' * 50_000, "9" * 6000, '{"a": 2e400}', "<html>\x1b",
    "\x0b\x0c", '{"a": "\\ud800"}', '{"a": 1} {"b": 2}', '"\x1b[2J"', '{"a": [' + "9" * 5000 + "]}",
)  # fmt: skip


def odd(rng: random.Random) -> Any:
    """A copy of a number or of another odd value."""
    return copy.deepcopy(rng.choice(rng.choice((NUMBERS, ODD))))


def noise(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """The bytes, damaged as by a disk, a network or an editor; and what was done to them."""
    changed, where = bytearray(data), rng.randrange(len(data))
    length = min(rng.choice((1, 2, 8, 64, 512)), len(data) - where)
    kind = rng.choice(("flip", "set", "noise", "cut", "append", "delete", "insert", "zero", "move"))
    if kind == "flip":
        changed[where] ^= 1 << rng.randrange(8)
    elif kind == "set":
        changed[where] = rng.choice((0, 1, 9, 0x1B, 0x22, 0x31, 0x5B, 0x7B, 0x7F, 0x80, 0xC0, 0xFF))
    elif kind == "noise":
        changed[where : where + length] = rng.randbytes(length)
    elif kind == "cut":
        del changed[where:]
    elif kind == "append":
        changed += rng.choice((b"\0", bytes(8), data))
    elif kind == "delete":
        del changed[where : where + length]
    elif kind == "insert":
        changed[where:where] = rng.randbytes(length)
    elif kind == "zero":
        changed[where : where + length] = bytes(length)
    else:
        other = rng.randrange(len(data) - length + 1)
        changed[where : where + length] = data[other : other + length]
    return bytes(changed), f"noise, {kind} at byte {where} of {len(data)}"


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every field, and of the first and last item of every list."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key, inner in value.items():
            found += places(inner, (*path, key))
    elif isinstance(value, list):
        for i in sorted({0, len(value) - 1} & {*range(len(value))}):
            found += places(value[i], (*path, i))
    return found


def at(value: Any, path: tuple[Any, ...]) -> Any:
    """The value at this path."""
    for key in path:
        value = value[key]
    return value


def damage(value: Any, rng: random.Random, never: tuple[str, ...] | None = None) -> str:
    """Remove a field or item of a JSON value, rename it, or give it an odd value.

    Args:
        value: the JSON value, which is changed in place.
        never: fields that may get any value. Every other field gets a value that is impossible for
            it: no number in place of a number, no text in place of a text. None: every field may
            get any value.

    Returns:
        What was done.
    """
    # A list that loses an item, or gets another one, may still be possible, if it is deep in the
    # value. Example: the path of the first token of a body is ("choices", 0, "token_ids", 0). So
    # with `never`, only items whose path has at most 3 steps change.
    paths = [p for p in places(value) if never is None or not isinstance(p[-1], int) or len(p) < 4]
    *parents, last = rng.choice(paths)
    parent = at(value, tuple(parents))
    kind = rng.choice(("typed", "typed", "typed", "missing", "named"))
    if kind == "missing" or (kind == "named" and isinstance(parent, list)):
        del parent[last]
    elif kind == "named":
        parent[f"{last}_"] = parent.pop(last)
    else:
        old, new = parent[last], odd(rng)
        alike = (_is_number(new) and _is_number(old)) or (type(new) is type(old) is str)
        # Example: 5 instead of the token 7 is another response, but possible; [5] is impossible.
        parent[last] = [new] if never is not None and alike and last not in never else new
    return f"{kind} {'.'.join(map(str, [*parents, last]))}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
