"""Tries on responses of servers: other values, impossible ones, damage, unrelated JSON.

Each try begins with made-up samples, so that it knows what must come out: these samples, perhaps
with another possible value in them, or an error that names the request.

Shape suffixes (docs/glossary.md): K, L, N, T, U.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import math
import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_r3.data import engines
from megatron_r3.data.rollout import Rollout
from megatron_r3.data.untrusted import read_json
from proof.fuzz import bodies
from proof.fuzz.bodies import VOCABULARY, Answer, Dialect
from proof.fuzz.body_changes import CHANGES, ODD, changed_text
from proof.fuzz.outcome import Kind, Verdict, judged, note

WHERE = "prompts.jsonl, line 3, sample 1"


def prepare(shared: Path) -> dict[str, Callable[..., list[Rollout]]]:
    """The decoders."""
    return {name: partial(engines.decode, name) for name in ("vllm", "sglang", "megatron")}


def attempt(rng: random.Random, folder: Path, decoders: dict[str, Any]) -> Verdict:
    """Make an answer, put it into a body, change one of them, and decode the body."""
    name = rng.choice([*bodies.DIALECTS])
    dialect = bodies.DIALECTS[name]
    answer = bodies.make_answer(rng, dialect.shape, rng.choice((1, 1, 1, 2, 3)))
    kind = rng.choice([*_WAYS])
    possible, must = True, kind in ("nothing", "other value", "other order")
    expected = copy.deepcopy(answer)
    if kind == "other value":
        said = _other_value(answer, dialect, rng)
        expected = copy.deepcopy(answer)
    elif kind == "impossible":
        said, possible = _impossible(answer, dialect, rng), False
    else:
        said = ""
    body, request = dialect.build(answer)
    if kind in CHANGES:
        body, said = CHANGES[kind](body, rng)
    text = json.dumps(body)
    if kind == "text":
        text, said = changed_text(text, rng)
    note(folder, f"{name}, {kind}: {said}"[:500])
    (folder / "body").write_text(text, errors="surrogatepass")
    (folder / "request.json").write_text(json.dumps(request))
    wanted = [_samples(expected, dialect)]
    if kind == "base64":  # right is what was there before the damage, and what numpy reads now
        _reread(expected, body, dialect)
        wanted.append(_samples(expected, dialect))
    decode = decoders[dialect.engine]

    def difference(got: list[Rollout]) -> str | None:
        if not possible:
            return f"accepted, and it cannot be: {said}"
        found = [decode_difference(got, one) for one in wanted]
        return None if None in found else found[-1]

    return judged(lambda: decode_all(decode, text, request, dialect), difference, [WHERE], must)


def decode_all(
    decode: Callable[..., list[Rollout]], text: str, request: dict[str, Any], dialect: Dialect
) -> list[Rollout]:
    """Do with a body what a collection does: parse it within bounds, then decode it."""
    return decode(read_json(text, WHERE), json.loads(json.dumps(request)), dialect.shape, WHERE)


def _samples(answer: Answer, dialect: Dialect) -> list[dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            {
                "tokens_N": [*answer.prompt, *one.tokens],
                "prompt_length": len(answer.prompt),
                "logprobs_G": np.array(
                    [math.nan if v is None else float(v) for v in one.logprobs], np.float32
                ).tolist(),
                "routes": _moe_rows(one.rows, dialect),
                "turns": [[len(answer.prompt), len(answer.prompt) + len(one.tokens)]],
                "group": 0,
            }
            for one in answer.choices
        ]


def _moe_rows(rows: Any, dialect: Dialect) -> list[Any] | None:
    """The ids `[L, T, K]` of the MoE layers, as lists; None if the rows have no such axes."""
    if not isinstance(rows, np.ndarray) or rows.ndim != 3:
        return None
    if rows.shape[1] == dialect.shape.num_hidden_layers:
        rows = rows[:, [*dialect.shape.moe_layers]]
    return rows.swapaxes(0, 1).tolist()


def decode_difference(got: list[Rollout], wanted: list[dict[str, Any]]) -> str | None:
    """Where decoded samples differ from those of the answer; None if they do not."""
    if len(got) != len(wanted):
        return f"{len(got)} samples, not {len(wanted)}"
    for index, (sample, fields) in enumerate(zip(got, wanted, strict=True)):
        found = {
            "tokens_N": sample.tokens_N.tolist(),
            "prompt_length": sample.prompt_length,
            "logprobs_G": sample.logprobs_N[sample.response_N].tolist(),
            "routes": sample.routes.ids_LTK.tolist()
            if sample.routes.recorded_T.all()
            else "missing",
            "turns": sample.spans_U2.tolist(),
            "group": sample.group,
        }
        for name, value in fields.items():
            if found[name] != value:
                return f"sample {index}: {name} is {found[name]!r:.300}, not {value!r:.300}"
    return None


# -- values


def _other_value(answer: Answer, dialect: Dialect, rng: random.Random) -> str:
    """Put another possible value in, which must come out as it was sent; return which."""
    choice = rng.choice(answer.choices)
    where = rng.randrange(len(choice.tokens))
    kind = rng.choice(("token", "log-prob", "routes", "unknown fields", "no model", "reason"))
    if kind == "token":
        choice.tokens[where] = rng.choice((0, VOCABULARY - 1, rng.randrange(VOCABULARY)))
    elif kind == "log-prob":
        choice.logprobs[where] = rng.choice((0, -0.0, -1e-30, -63.9, -1, 1e-7))
    elif kind == "routes":
        rows = bodies.make_rows(rng, len(choice.rows), dialect.shape)
        if len(answer.choices) == 1:
            choice.rows = rows
    elif kind == "unknown fields":
        answer.extra = {"new_field": rng.choice(ODD[:30]), "another": {"deep": [[[1]]]}}
    elif kind == "no model":
        answer.model = None if dialect.names_model else answer.model
    else:
        choice.reason = rng.choice(("stop", "length"))
    return kind


def _impossible(answer: Answer, dialect: Dialect, rng: random.Random) -> str:
    """Put an impossible value in; return which."""
    choice = rng.choice(answer.choices)
    where = rng.randrange(len(choice.tokens))
    kinds = ["log-prob", "log-prob", "token", "routes", "routes", "counts", "too many", "aborted"]
    kinds += ["prompt"] * dialect.returns_prompt + ["names"] * dialect.names_tokens
    kinds += ["model"] * dialect.names_model
    kind = rng.choice(kinds)
    if kind == "log-prob":
        value = rng.choice((5.0, 0.01, -9999.0, -95.0, math.nan, math.inf, -math.inf, 1e308, None,
                            "-1", True, [], "nan", -(10**400)))  # fmt: skip
        choice.logprobs[where] = value
    elif kind == "token":
        known = dialect.shape.vocab_size
        value = rng.choice((-1, 2**31, 2**63, 2**70, 1.0, "12", True, None, known or 2**31))
        choice.tokens[where] = value
    elif kind == "routes":
        return f"routes, {_impossible_rows(choice, dialect, rng)}"
    elif kind == "counts":
        value = rng.choice(("tokens", "log-probs", "rows"))
        if value == "tokens":
            choice.names = choice.names or [f"token_id:{one}" for one in choice.tokens]
            choice.tokens = rng.choice(([*choice.tokens, 3], choice.tokens[:-1]))
        elif value == "log-probs":
            choice.logprobs = rng.choice(([*choice.logprobs, -1.0], choice.logprobs[:-1]))
        else:
            rows = choice.rows
            choice.rows = rng.choice((rows[:-1], rows[1:], np.concatenate([rows, rows[:1]])))
    elif kind == "too many":  # more tokens than the request allowed, with their routes
        value = f"{len(choice.tokens)} of {len(choice.tokens) - 1}"
        answer.max_tokens = max(len(one.tokens) for one in answer.choices) - 1
    elif kind == "aborted":
        choice.reason = value = rng.choice(("abort", "error"))
    elif kind == "prompt":
        answer.returned_prompt = value = [*answer.prompt[:-1], *[(answer.prompt[-1] + 1) % 60] * 2]
    elif kind == "names":
        names = [f"token_id:{one}" for one in choice.tokens]
        names[where] = f"token_id:{(choice.tokens[where] + 1) % VOCABULARY}"
        if dialect is bodies.DIALECTS["sglang"]:
            names = [*choice.tokens]
            names[where] = (names[where] + 1) % VOCABULARY
        choice.names, value = names, names[where]
    else:
        answer.model = value = rng.choice(("other", "tiny2", "TINY", "\x1b[2J", 7))
    return f"{kind} {value!r:.60}"


def _impossible_rows(choice: Any, dialect: Dialect, rng: random.Random) -> str:
    rows, shape = choice.rows, dialect.shape
    row, layer = rng.randrange(len(rows)), rng.choice(shape.moe_layers)
    kind = rng.choice(("twice", "outside", "zeros", "all zeros", "layers", "top-k", "dense", "axes",
                       "floats", "swapped axes"))  # fmt: skip
    dense = [i for i in range(shape.num_hidden_layers) if i not in shape.moe_layers]
    if kind == "outside":
        rows = choice.rows = rows.astype(np.int64)
        most = 255 if dialect.engine == "vllm" else 2**31 - 1
        rows[row, layer, 0] = rng.choice((shape.num_experts, most, -1))
    elif kind == "zeros":
        rows[row, layer] = 0
    elif kind == "all zeros":
        rows[:] = 0
    elif kind == "layers":
        choice.rows = rng.choice((rows[:, :-1], np.concatenate([rows, rows[:, 1:2]], 1)))
    elif kind == "top-k":
        choice.rows = rng.choice((rows[:, :, :-1], np.concatenate([rows, rows[:, :, :1]], 2)))
    elif kind == "dense" and dense:
        rows[row, dense[0]] = [1, 2, 3, 4]
    elif kind == "axes" and dialect.engine == "vllm":
        choice.rows = rng.choice((rows.reshape(len(rows), -1), rows[None]))
    elif kind == "floats" and dialect.engine == "vllm":
        choice.rows = rows + 0.5
    elif kind == "swapped axes" and len(rows) not in (shape.num_hidden_layers, 3, 1):
        choice.rows = rows.swapaxes(0, 1).copy()
    else:
        rows[row, layer, 0] = rows[row, layer, 1]
        return "twice"
    return kind


# -- the routes of a damaged body


def _reread(answer: Answer, body: Any, dialect: Dialect) -> None:
    """Put into an answer the routes that numpy reads from its damaged body.

    Where numpy cannot read any, the answer keeps its routes: a decoder may refuse the body, or find
    a way to read what was sent.
    """
    if dialect.engine == "megatron":
        holders = [one["moe_topk_indices"][1] for one in body["choices"]]
    elif dialect.engine == "vllm":
        holders = body["choices"]
    elif isinstance(body, dict) and "sglext" in body:
        holders = [body["sglext"]]
    else:
        items = body["choices"] if isinstance(body, dict) and "choices" in body else body
        holders = [one["meta_info"] for one in (items if isinstance(items, list) else [items])]
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
        except Exception:  # numpy raises many kinds of them
            continue
        choice.rows = rows


_WAYS = ["nothing", "text", "other value", "impossible", "impossible", "impossible"]
_WAYS += ["field", "field", "field", "base64", "base64", "choices", "other order"]

KIND = Kind("responses", 400, 30.0, 1024, prepare, attempt)
