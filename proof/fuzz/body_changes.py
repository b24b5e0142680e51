"""Damage to the form of a body: its fields, choices, base64 and text."""

from __future__ import annotations

import base64
import copy
import math
import random
from collections.abc import Callable
from typing import Any

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 5, 2**31, 2**63, -(2**70), 0.0, 1.5, math.nan, math.inf, "", "a",
    "AAAA", "\x1b[2J", "\ud800", "\u202e", [], {}, [[]], [[[]]], [None], [1, [2]], [[1], [2, 3]],
    {"data": [], "dtype": "int16"}, "k05VTVBZ", [[[0] * 4] * 3] * 9, "a" * 3000, {"a": {"b": 1}},
    {"message": "no\nroom\x1b[2J"}, [{}], [[0, 0]], "x" * 100_000, {"type": "abort"}, [3] * 400,
]  # fmt: skip


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every field, and of the first and last item of every list."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key, inner in value.items():
            found += _places(inner, (*path, key))
    elif isinstance(value, list):
        for i in {0, len(value) - 1} & {*range(len(value))}:
            found += _places(value[i], (*path, i))
    return found


# Fields that say nothing of the sample: whatever stands there, the same sample must come out.
_NO_VALUE = (
    "created",
    "id",
    "usage",
    "stop_reason",
    "text",
    "text_offset",
    "top_logprobs",
    "bytes",
)


def _odd_field(body: Any, rng: random.Random) -> tuple[Any, str]:
    """Take a field out, rename it, or give it a value of another type, but never another value."""
    body = copy.deepcopy(body)
    places = [p for p in _places(body) if not isinstance(p[-1], int) or len(p) < 4]
    *parents, last = rng.choice(places)
    parent = body
    for key in parents:
        parent = parent[key]
    kind = rng.choice(("missing", "named", "typed", "typed", "typed"))
    if kind == "missing" or (kind == "named" and isinstance(parent, list)):
        del parent[last]
    elif kind == "named":
        parent[f"{last}_"] = parent.pop(last)
    else:
        old, odd = parent[last], copy.deepcopy(rng.choice(ODD))
        alike = (_is_number(odd) and _is_number(old)) or (
            isinstance(odd, str) and isinstance(old, str)
        )
        if alike and last not in _NO_VALUE:
            odd = [odd]  # as it is, another number or text might be another possible value
        parent[last] = odd
    return body, f"{kind} {'.'.join(map(str, [*parents, last]))}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _other_order(body: Any, rng: random.Random) -> tuple[Any, str]:
    """Put the choices into another order. Their `index` still says which is which."""
    if isinstance(body, dict) and isinstance(body.get("choices"), list) and "sglext" not in body:
        body = copy.deepcopy(body)
        rng.shuffle(body["choices"])
    elif isinstance(body, dict):
        body = dict(rng.sample([*body.items()], len(body)))
    return body, ""


def _odd_choices(body: Any, rng: random.Random) -> tuple[Any, str]:
    """Take a choice out, put it in twice, or change its number."""
    kind = rng.choice(("twice", "none", "fewer", "index", "null"))
    body = copy.deepcopy(body)
    choices = body["choices"] if isinstance(body, dict) and "choices" in body else None
    if choices is None:  # SGLang's list, or its one sample
        items = body if isinstance(body, list) else [body]
        return {"twice": [*items, items[0]], "none": [], "fewer": items[:-1], "index": {"0": items},
                "null": [None, *items[1:]]}[kind], kind  # fmt: skip
    if kind == "index":
        choices[0]["index"] = rng.choice((7, -1, None, "0", 0.0, True, 2**70))
    else:
        body["choices"] = {"twice": [*choices, choices[0]], "none": [], "fewer": choices[:-1],
                           "null": [None, *choices[1:]]}[kind]  # fmt: skip
    return body, kind


def _routes_places(body: Any) -> list[tuple[dict[str, Any], str]]:
    found = []
    for path in _places(body):
        if path[-1] in ("routed_experts", "data"):  # Megatron's bytes are its `data`
            parent = body
            for key in path[:-1]:
                parent = parent[key]
            if isinstance(parent[path[-1]], str):
                found.append((parent, path[-1]))
    return found


def _damaged_base64(body: Any, rng: random.Random) -> tuple[Any, str]:
    """Damage the base64 text of the routes, or the bytes in it."""
    body = copy.deepcopy(body)
    parent, key = rng.choice(_routes_places(body))
    raw = bytearray(base64.b64decode(parent[key]))
    kind = rng.choice(
        ("flip", "flip", "header", "header", "cut", "longer", "letter", "cut text", "line")
    )
    where = rng.randrange(len(raw))
    if kind in ("flip", "header"):
        where = rng.randrange(min(128, len(raw))) if kind == "header" else where
        raw[where] = rng.choice((0, 255, raw[where] ^ 1 << rng.randrange(8), rng.randrange(16)))
    elif kind == "cut":
        del raw[where:]
    elif kind == "longer":
        raw += rng.randbytes(rng.choice((1, 4, 12, 16, 64)))
    text = base64.b64encode(raw).decode()
    if kind == "letter":
        place = rng.randrange(len(text))
        text = text[:place] + rng.choice("=!- \u00e9\x00") + text[place + 1 :]
    elif kind == "cut text":
        text = text[: rng.randrange(len(text))]
    elif kind == "line":
        text = text[:8] + "\n" + text[8:]
    parent[key] = text
    return body, kind


def changed_text(text: str, rng: random.Random) -> tuple[str, str]:
    """Text that is no whole body any more, or the body of another service."""
    where = rng.randrange(len(text) - 4)
    kind = rng.choice(("cut", "html", "deep", "deep list", "digits", "quote", "nothing", "other"))
    changed = {
        "cut": text[:where], "html": "<html>\x1b[2J</html>", "deep": '{"a":' * 100_000,
        "deep list": '{"choices": ' + "[" * 3000 + "]" * 3000 + "}", "nothing": "",
        "digits": '{"choices": ' + "9" * 5000 + "}", "quote": f'"{where}"',
        "other": rng.choice(('{"error": {"message": "no room\\n\\u001b[2J"}}', "null", "[]", "{}",
                             '{"detail": "Not Found"}', '{"object": "error"}', "3", "[null]",
                             '{"detail": [{"loc": ["body"], "msg": "\\u202e"}]}',
                             '{"meta_info": {}}', '{"choices": {}}', '{"choices": [[]]}',
                             "data: [DONE]\n\n", 'data: {"choices": [3]}\n\ndata: [DONE]\n\n',
                             f"data: {'[' * 100_000}\n\ndata: [DONE]\n\n",
                             f'data: {{"choices": {"9" * 5000}}}\n\ndata: [DONE]\n\n')),
    }[kind]  # fmt: skip
    return changed, kind


CHANGES: dict[str, Callable[[Any, random.Random], tuple[Any, str]]] = {
    "field": _odd_field,
    "choices": _odd_choices,
    "base64": _damaged_base64,
    "other order": _other_order,
}
