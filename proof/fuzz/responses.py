"""Tries on responses of servers: other values, impossible values, damage, unrelated JSON.

Each try puts made-up samples into a body, so it knows what must come out: the same samples, or an
error that names the request.

Shape suffixes (docs/glossary.md): G, K, L, N, T, U.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import math
import random
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from megatron_r3.data import engines
from megatron_r3.data.rollout import Rollout
from megatron_r3.data.untrusted import read_json
from proof.fuzz import bodies
from proof.fuzz.bodies import VOCABULARY, Answer, Choice, Dialect
from proof.fuzz.damage import TEXTS, at, damage, noise, odd, places
from proof.fuzz.driver import Kind
from proof.fuzz.outcome import judged, note

WHERE = "prompts.jsonl, line 3, sample 1"
_WAYS = ("nothing", "other order", "other value", *["impossible"] * 3, *["field"] * 3, "base64",
         "base64", "choices", "text")  # fmt: skip
# Fields that say nothing about the sample: with any value in them, the same sample must come out.
_SAY_NOTHING = ("created", "id", "usage", "stop_reason", "text", "top_logprobs", "bytes")
_TEXTS = (
    *TEXTS, '{"error": {"message": "no room\\n\\u001b[2J"}}', '{"detail": "Not Found"}',
    '{"object": "error"}', '{"detail": [{"loc": ["body"], "msg": "\\u202e"}]}',
    '{"meta_info": {}}', '{"choices": {}}', '{"choices": [[]]}', '{"choices": ' + "9" * 5000 + "}",
    '{"choices": ' + "[" * 3000 + "]" * 3000 + "}",
)  # fmt: skip


def attempt(rng: random.Random, folder: Path, state: None) -> str:
    """Make an answer and its body, change the answer or the body, and decode the body."""
    name = rng.choice([*bodies.DIALECTS])
    dialect = bodies.DIALECTS[name]
    answer = bodies.make_answer(rng, dialect.shape, rng.choice((1, 1, 1, 2, 3)))
    kind, said = rng.choice(_WAYS), ""
    if kind == "other value":
        said = _other_value(answer, dialect, rng)
    expected = copy.deepcopy(answer)
    if kind == "impossible":
        said = _impossible(answer, dialect, rng)
    body, request = dialect.build(answer)
    if kind in _CHANGES:
        body, said = _CHANGES[kind](copy.deepcopy(body), rng)
    text = json.dumps(body)
    if kind == "text":
        text = rng.choice((text[: rng.randrange(len(text) - 4)], *_TEXTS))
    note(folder, f"{name}, {kind}: {said}"[:500])
    (folder / "body").write_text(text, errors="surrogatepass")
    (folder / "request.json").write_text(json.dumps(request))
    wanted = [_samples(expected, dialect)]
    # a decoder may return the routes as they were sent, or as numpy reads the damaged text
    if kind == "base64":
        _reread(expected, body, dialect)
        wanted.append(_samples(expected, dialect))

    def decode() -> list[Sample]:
        """Do with the body what a collection does: parse the JSON with limits, then decode it."""
        asked, response = json.loads(json.dumps(request)), read_json(text, WHERE)
        rollouts = engines.decode(dialect.engine, response, asked, dialect.shape, WHERE)
        return [_sample(rollout) for rollout in rollouts]

    def difference(got: list[Sample]) -> str | None:
        if kind == "impossible":
            return f"accepted, but this is impossible: {said}"
        odd_ones = [(a, b) for a, b in zip_longest(got, wanted[-1]) if a != b]
        return None if got in wanted else f"{odd_ones[0][0]}, not {odd_ones[0][1]}"

    return judged(decode, difference, [WHERE], kind in ("nothing", "other value", "other order"))


# tokens, length of the prompt, log-probs of the sampled tokens, routes, turns, group
Sample = tuple[list[int], int, list[float], list[Any] | None, list[list[int]], int]


def _sample(rollout: Rollout) -> Sample:
    routes = rollout.routes.ids_LTK.tolist() if rollout.routes.recorded_T.all() else None
    logprobs_G = rollout.logprobs_N[rollout.response_N].tolist()
    tokens, turns = rollout.tokens_N.tolist(), rollout.spans_U2.tolist()
    return tokens, rollout.prompt_length, logprobs_G, routes, turns, rollout.group


def _samples(answer: Answer, dialect: Dialect) -> list[Sample]:
    """The samples that must come out of an answer's body."""
    samples, begin = [], len(answer.prompt)
    for one in answer.choices:
        rows, routes = one.rows, None
        if rows.ndim == 3:  # else no decoder can read the routes
            whole = rows.shape[1] == dialect.shape.num_hidden_layers
            rows = rows[:, [*dialect.shape.moe_layers]] if whole else rows
            routes = rows.swapaxes(0, 1).tolist()
        logprobs = np.array(one.logprobs, np.float32).tolist()
        tokens, turns = [*answer.prompt, *one.tokens], [[begin, begin + len(one.tokens)]]
        samples.append((tokens, begin, logprobs, routes, turns, 0))
    return samples


# -- values

_BAD_LOGPROBS: Any = (
    5.0, 0.01, -9999.0, -95.0, math.nan, math.inf, -math.inf, 1e308, None, "-1", True, [], "nan",
    -(10**400),
)  # fmt: skip
_BAD_TOKENS = (-1, 2**31, 2**63, 2**70, 1.0, "12", True, None, VOCABULARY)


def _other_value(answer: Answer, dialect: Dialect, rng: random.Random) -> str:
    """Put a possible value into an answer, which a decoder must return; return the value's kind."""
    choice = rng.choice(answer.choices)
    where = rng.randrange(len(choice.tokens))
    kind = rng.choice(("token", "log-prob", "routes", "unknown fields", "no model", "reason"))
    if kind == "token":
        choice.tokens[where] = rng.choice((0, VOCABULARY - 1))
    elif kind == "log-prob":
        choice.logprobs[where] = rng.choice((0, -0.0, -1e-30, -63.9, -1, 1e-7))
    elif kind == "routes" and len(answer.choices) == 1:
        choice.rows = bodies.make_rows(rng, len(choice.rows), dialect.shape)
    elif kind == "unknown fields":
        answer.extra = {"new_field": odd(rng), "another": {"deep": [[[1]]]}}
    elif kind == "no model":
        answer.model = None if dialect.names_model else answer.model
    else:
        choice.reason = rng.choice(("stop", "length"))
    return kind


def _impossible(answer: Answer, dialect: Dialect, rng: random.Random) -> str:
    """Put an impossible value into an answer; return a description of it."""
    choice = rng.choice(answer.choices)
    where = rng.randrange(len(choice.tokens))
    kinds = ["log-prob", "log-prob", "token", "routes", "routes", "counts", "too many", "aborted"]
    kinds += ["prompt"] * dialect.returns_prompt + ["names"] * dialect.names_tokens
    kind = rng.choice([*kinds, *["model"] * dialect.names_model])
    value: Any = kind
    if kind == "log-prob":
        choice.logprobs[where] = value = rng.choice(_BAD_LOGPROBS)
    elif kind == "token":
        choice.tokens[where] = value = rng.choice(_BAD_TOKENS)
    elif kind == "routes":
        value = _impossible_rows(choice, dialect, rng)
    elif kind == "counts":
        value = rng.choice(("tokens", "logprobs", "rows"))
        choice.names = choice.names or [f"token_id:{one}" for one in choice.tokens]
        items = [*getattr(choice, value)]
        items = rng.choice((items[:-1], [*items, items[0]]))
        setattr(choice, value, np.array(items) if value == "rows" else items)
    elif kind == "too many":  # more tokens than the request allows, with their routes
        answer.max_tokens = value = max(len(one.tokens) for one in answer.choices) - 1
    elif kind == "aborted":
        choice.reason = value = rng.choice(("abort", "error"))
    elif kind == "prompt":
        answer.returned_prompt = value = [*answer.prompt, (answer.prompt[-1] + 1) % VOCABULARY]
    elif kind == "names":
        text = "" if dialect is bodies.DIALECTS["sglang"] else "token_id:"
        named = [(one + (i == where)) % VOCABULARY for i, one in enumerate(choice.tokens)]
        choice.names = value = [f"{text}{one}" if text else one for one in named]
    else:
        answer.model = value = rng.choice(("other", "tiny2", "TINY", "\x1b[2J", 7))
    return f"{kind} {value!r:.60}"


def _impossible_rows(choice: Choice, dialect: Dialect, rng: random.Random) -> str:
    rows, shape = choice.rows.astype(np.int64), dialect.shape
    row, layer = rng.randrange(len(rows)), rng.choice(shape.moe_layers)
    dense = {*range(shape.num_hidden_layers)} - {*shape.moe_layers}
    shapes: dict[str, np.ndarray] = {
        "less top-k": rows[:, :, :-1],
        "more top-k": rows[:, :, [0, 1, 2, 3, 0]],
        "less layers": rows[:, :-1],
        "more layers": rows[:, [*range(rows.shape[1]), 1]],
    }
    if dialect.engine == "vllm":
        shapes |= {"floats": rows + 0.5, "less axes": rows[..., 0], "more axes": rows[None]}
    if len(rows) not in (shape.num_hidden_layers, 3, 1):
        shapes["swapped axes"] = rows.swapaxes(0, 1).copy()
    most = 255 if dialect.engine == "vllm" else 2**31 - 1
    values = {"twice": rows[row, layer, 1], "outside": shape.num_experts, "most": most, "-1": -1}
    kind = rng.choice([*shapes, *values, "zeros", "all zeros", "dense"])
    choice.rows = shapes.get(kind, rows)
    if kind in values or (kind == "dense" and not dense):
        rows[row, layer, 0] = values.get(kind, -1)
    elif kind in ("zeros", "all zeros"):
        rows[row if kind == "zeros" else slice(None), layer] = 0
    elif kind == "dense":
        rows[row, min(dense)] = [1, 2, 3, 4]
    return kind


# -- the form of a body: fields, choices, base64


def _odd_field(body: Any, rng: random.Random) -> tuple[Any, str]:
    """Remove or rename a field, or give it an impossible value (any value for `_SAY_NOTHING`)."""
    return body, damage(body, rng, _SAY_NOTHING)


def _other_order(body: Any, rng: random.Random) -> tuple[Any, str]:
    """Put the choices into another order; their `index` stays."""
    if isinstance(body, dict) and "choices" in body and "sglext" not in body:
        rng.shuffle(body["choices"])
    return body, ""


def _odd_choices(body: Any, rng: random.Random) -> tuple[Any, str]:
    """Remove choices, repeat one, or change its `index`."""
    kind = rng.choice(("twice", "none", "fewer", "index", "null"))
    choices = body["choices"] if isinstance(body, dict) and "choices" in body else None
    items = choices or (body if isinstance(body, list) else [body])  # SGLang's list, or one sample
    changed: Any = {
        "twice": [*items, items[0]],
        "none": [],
        "fewer": items[:-1],
        "index": {"0": items},
        "null": [None, *items[1:]],
    }[kind]
    if choices is None:
        return changed, kind
    if kind == "index":
        choices[0]["index"] = rng.choice((7, -1, None, "0", 0.0, True, 2**70))
    else:
        body["choices"] = changed
    return body, kind


def _damaged_base64(body: Any, rng: random.Random) -> tuple[Any, str]:
    """Damage the base64 text of the routes, or the bytes in it."""
    # Megatron's bytes are in the field `data`
    found = [path for path in places(body) if path[-1] in ("routed_experts", "data")]
    *parents, key = rng.choice([path for path in found if isinstance(at(body, path), str)])
    parent = at(body, tuple(parents))
    raw, text = base64.b64decode(parent[key]), parent[key]
    where = rng.randrange(len(raw))
    kind = rng.choice(("bytes", "header", "id", "letter", "cut", "line"))
    if kind == "bytes":
        raw, kind = noise(raw, rng)
    elif kind == "header":
        head, kind = noise(raw[:128], rng)
        raw = head + raw[128:]
    elif kind == "id":
        raw = raw[:where] + bytes([rng.randrange(16)]) + raw[where + 1 :]
    changed = base64.b64encode(raw).decode()
    other = {"letter": text[:where] + rng.choice("=!- \u00e9\x00") + text[where + 1 :],
             "cut": text[:where], "line": text[:8] + "\n" + text[8:]}  # fmt: skip
    parent[key] = other.get(kind, changed)
    return body, kind


_CHANGES: dict[str, Callable[[Any, random.Random], tuple[Any, str]]] = {
    "field": _odd_field,
    "choices": _odd_choices,
    "base64": _damaged_base64,
    "other order": _other_order,
}


# -- the routes of a damaged body


def _reread(answer: Answer, body: Any, dialect: Dialect) -> None:
    """Replace the routes of an answer by those that numpy reads from its damaged body.

    If numpy cannot read the routes of a choice, the choice keeps its own: a decoder may refuse the
    body, or still read what was sent.
    """
    if isinstance(body, dict) and "sglext" in body:
        holders = [body["sglext"]]
    else:
        items = body["choices"] if isinstance(body, dict) and "choices" in body else body
        holders = items if isinstance(items, list) else [items]
    if dialect.engine == "megatron":
        holders = [one["moe_topk_indices"][1] for one in holders]
    holders = [one.get("meta_info", one) for one in holders]
    for choice, holder in zip(answer.choices, holders, strict=True):
        try:
            key = "data" if dialect.engine == "megatron" else "routed_experts"
            raw = base64.b64decode(holder[key], validate=True)
            if dialect.engine == "megatron":
                rows = np.frombuffer(raw, holder["dtype"]).reshape(holder["shape"])
            elif dialect.engine == "vllm":
                rows = np.load(io.BytesIO(raw), allow_pickle=False)
            else:
                shape = (-1, dialect.shape.num_hidden_layers, dialect.shape.topk)
                rows = np.frombuffer(raw, "<i4").reshape(shape)
        except Exception:  # numpy raises errors of many kinds
            continue
        choice.rows = rows


KIND = Kind("responses", attempt)
