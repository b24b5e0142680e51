"""Put impossible values into a shard, under checksums that are right.

No rollout can have a forged value. So a reader that accepts the shard is wrong, unless the reader
does not use the value, and all that it returns is what was written. The checksums are made by
tests/support/stored.py, which is written from docs/rollout-store.md, without megatron_r3's writer.

Shape suffixes (docs/glossary.md): K, L, M, N, T, U.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import stored
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from megatron_r3.data.store import StoreInfo
from proof.fuzz.damage import TEXTS, odd

VOCABULARY = 64
_WRAP = 2**62  # the sum of four of these is 2**64, which wraps around to 0 in 64 bits
Tensors = dict[str, np.ndarray]


def write_again(path: Path, info: StoreInfo, tensors: Tensors) -> None:
    """Write a shard with these tensors, and with checksums that are right wherever possible."""
    with safe_open(path, "numpy") as file:
        texts = file.metadata()
    save_file(tensors, path, texts)
    stored.rewrite(path, info)


def forge(path: Path, info: StoreInfo, rng: random.Random) -> str:
    """Put one impossible value into a shard; return a description of it."""
    forgery = rng.choice((*_OF_TENSORS, *_OF_HEADERS))
    if forgery in _OF_HEADERS:
        said = _OF_HEADERS[forgery](path, rng)
    else:
        tensors = load_file(path)
        said = _OF_TENSORS[forgery](tensors, info, rng)
        try:
            write_again(path, info, tensors)
        except (KeyError, IndexError, ValueError):
            if forgery not in ("counts", "sizes", "shape"):
                raise
            # these three may make tensors that have no checksums: the old ones stay
    return f"{forgery}: {said:.200}"


# -- tensors

_BAD_FLOATS = (math.nan, math.inf, -math.inf)
_VALUES: dict[str, tuple[Any, ...]] = {
    "logprobs": (5.0, 1e-3, -9999.0, -95.0, -1e30, *_BAD_FLOATS),
    "logprobs outside": (-1.0, 5.0, *_BAD_FLOATS),
    "tokens": (-1, -(2**31)),
    # `turns` determines `response`, so the opposite value is impossible. No other tensor determines
    # `recorded`, so only values other than 0 and 1 are impossible.
    "response": (2, 255, "opposite"), "recorded": (2, 255),
    "reward": _BAD_FLOATS, "advantage": (math.inf, -math.inf),
    "sample": (-1, -(2**63)), "policy_version": (-1, -(2**63)), "prompt_digest": (-1,),
    "kept_ids": (-1, VOCABULARY, 2**31 - 1, -(2**31)),
}  # fmt: skip


def _value(tensors: Tensors, info: StoreInfo, rng: random.Random) -> str:
    what = rng.choice([name for name in _VALUES if name.split()[0] in tensors])
    value, tensor = rng.choice(_VALUES[what]), tensors[what.split()[0]]
    where: Any = range(len(tensor))
    if what.startswith("logprobs"):
        where = np.flatnonzero(tensors["response"] == (what == "logprobs")).tolist()
    if what == "tokens" and info.vocab_size:
        value = rng.choice((value, VOCABULARY, 2**31 - 1))
    place = rng.choice(where)
    tensor[place] = 1 - tensor[place] if value == "opposite" else value
    return f"{what} {value} at {place}"


def _twice(tensors: Tensors, info: StoreInfo, rng: random.Random) -> str:
    if "kept_ids" in tensors and rng.choice((True, False)):
        sizes_N = tensors["kept_sizes"]
        token = int(rng.choice(np.flatnonzero(sizes_N > 1).tolist()))
        first = int(sizes_N[:token].sum())
        tensors["kept_ids"][first + 1] = tensors["kept_ids"][first]
        return f"a kept id of token {token}"
    for name in ("sample", "policy_version", "group"):
        tensors[name][1] = tensors[name][0]
    return "the name of a rollout"


def _route(tensors: Tensors, info: StoreInfo, rng: random.Random) -> str:
    ids_LTK = tensors["routes"]
    layer, row = (
        rng.randrange(len(ids_LTK)),
        rng.choice(np.flatnonzero(tensors["recorded"]).tolist()),
    )
    most = int(np.iinfo(ids_LTK.dtype).max)
    value = rng.choice((int(ids_LTK[layer, row, 1]), info.num_experts, most))
    ids_LTK[layer, row, 0] = value
    return f"expert {value} in row {row} of layer {layer}"


def _counts(tensors: Tensors, info: StoreInfo, rng: random.Random) -> str:
    name = rng.choice(("num_tokens", "num_turns", "num_kept"))
    counts_M = tensors[name]
    total, least = int(counts_M.sum()), -1 if name == "num_turns" else 0  # 0 turns are possible
    kind = rng.choice(("wrap", "negative", "more", "less", "least", "huge"))
    if kind == "wrap":
        counts_M[:] = [_WRAP] * len(counts_M)
        if rng.choice((True, False)):  # set the last count so that the wrapped sum is right
            last = (total - (len(counts_M) - 1) * _WRAP) % 2**64
            counts_M[-1] = last - 2**64 * (last >= 2**63)
    elif kind in ("negative", "least"):  # the sum stays right
        new = -int(counts_M[0]) - 1 if kind == "negative" else least
        counts_M[0], counts_M[1] = new, counts_M[1] + counts_M[0] - new
    elif kind == "huge":
        counts_M[rng.randrange(len(counts_M))] = rng.choice((2**63 - 1, 2**40, 10**9))
    else:
        counts_M[rng.randrange(len(counts_M))] += 1 if kind == "more" else -1
    return f"{name} {kind} {counts_M.tolist()}"


def _spans(tensors: Tensors, info: StoreInfo, rng: random.Random) -> str:
    name = rng.choice([name for name in ("turns", "versions") if len(tensors[name])])
    spans_U2 = tensors[name].reshape(-1, 2)
    span = rng.randrange(len(spans_U2))
    begin, end = spans_U2[span].tolist()
    if name == "turns":
        odd_ones: Any = ((end, begin), (begin, begin), (-begin - 1, end), (begin, end + 1),
                    (begin, end - 1), (begin, 2**31 - 1))  # fmt: skip
    else:
        odd_ones = ((-1, 7), (0, 7), (2**40, 9), (begin, -1))
    spans_U2[span] = rng.choice(odd_ones)
    return f"{name} {spans_U2[span].tolist()} in place of {[begin, end]}"


def _sizes(tensors: Tensors, info: StoreInfo, rng: random.Random) -> str:
    if "kept_sizes" not in tensors:  # every shard has num_kept, with a value for each of 4 rollouts
        tensors["num_kept"] = np.zeros(3, np.int64)
        return "num_kept of 3 rollouts"
    sizes_N = tensors["kept_sizes"]
    sizes_N[rng.randrange(len(sizes_N))] += rng.choice((1, -1, 99, -99, 2**30))
    return f"kept sizes {sizes_N.tolist()}"


def _shape(tensors: Tensors, info: StoreInfo, rng: random.Random) -> str:
    name = rng.choice([*tensors])
    tensor = tensors[name]
    kind = rng.choice(("longer", "shorter", "empty", "missing", "named"))
    del tensors[name]
    if kind == "named":
        tensors[rng.choice(("", "Tokens", "tokens ", "\x1b[31m", "__metadata__ "))] = tensor
    elif kind != "missing":
        longer = np.concatenate([tensor, tensor[:1]])
        cut = {"longer": longer, "shorter": tensor[:-1], "empty": tensor[:0]}
        tensors[name] = cut[kind].copy()
    return f"{name} {kind}"


# -- the header

_IMPOSSIBLE: dict[str, tuple[Any, ...]] = {
    "num_experts": (0, -4, 3, 10**6, 2**70, 16.0, True, "16", None, [16]),
    "topk": (0, -1, 17, 400, 2.0, 4.0, True, "4", None),
    "moe_layers": ([], [-1, 1, 2], [5, 2, 1], [1, 1, 2], [1, 2], ["a", "b", "c"], "125", 3, None,
                   [1.0, 2.0, 5.0], [1, 2, 2**70], {"0": 1}, [[1], [2], [5]]),
    "engine": (7, None, "\x1b]0;title\x07", "x" * 6_000_000, ["vllm"], "a\nb", "\u202e"),
    "engine_version": (0.3, None, "\x1b[2J", "x" * 100_000, {}, "\ud800"),
    "model": (7, "\x1b[2J", "x" * 100_000, [], "a\r\nerror: b"),
    "router_fingerprint": ("abc", ["aa"], [1, 2, 3], [None] * 3, {"a": 1}, ["\x1b[2J"] * 3, 7),
    "policy_stamp": (7, ["a"], "\x1b[2J", "x" * 100_000),
    "engine_policy": (7, ["a"], "\x1b[2J", "x" * 100_000),
    "vocab_size": (-1, 1.5, "64", 2**70, True, [64], 3),
    "sampling": (7, [1], "hot", {"temperature": "hot"}, {"temperature": -1.0}, {"top_p": 7.0},
                 {"temperature": math.nan}, {"top_k": 1.5}, {"max_tokens": -3}, {"min_p": [0]}),
}  # fmt: skip
_NEEDED = ("num_experts", "topk", "moe_layers", "engine", "engine_version")


def _info(path: Path, rng: random.Random) -> str:
    body = stored.header_of(path)
    info = body["info"]
    name = rng.choice([key for key in info if key in _IMPOSSIBLE])
    value = rng.choice(_IMPOSSIBLE[name])
    if name in _NEEDED and rng.randrange(8) == 0:
        del info[name]
    else:
        both = isinstance(value, dict) and isinstance(info[name], dict)
        info[name] = {**info[name], **value} if both else value
    stored.rewrite_header(path, body)
    return f"{name} {info.get(name, 'missing')!r}"


def _body(path: Path, rng: random.Random) -> str:
    body = stored.header_of(path)
    name, value = rng.choice([*body]), odd(rng)
    if name == "number" and value == body[name]:
        value += 9
    elif isinstance(body[name], dict) and name != "info":  # `crc32`: change one tensor's checksum
        value = {**body[name], rng.choice([*body[name]]): value}
    body[name] = value
    stored.rewrite_header(path, body)
    return f"{name} {value!r}"


def _text(path: Path, rng: random.Random) -> str:
    text = rng.choice((*TEXTS, '{"info": null}', '{"version": 2e400}'))
    stored.rewrite_header(path, text.replace("\0", "0"))
    return f"{text:.60}"


def _unknown(path: Path, rng: random.Random) -> str:
    """Add a key that the format does not have, as another writer might."""
    body = stored.header_of(path)
    holders = {"body": body, "info": body["info"], "sampling": body["info"]["sampling"]}
    place = rng.choice([*holders])
    holders[place]["new\x1b[2J"] = odd(rng)
    stored.rewrite_header(path, body)
    return place


def _entry(path: Path, rng: random.Random) -> str:
    """Put a lie into safetensors' header: a tensor's shape, type or offsets, or a metadata text."""
    tensors = load_file(path)
    name = rng.choice([*tensors, "__metadata__"])
    if name == "__metadata__":
        key = rng.choice(("megatron_r3", "crc32"))
        lies: Any = [odd(rng)]
    else:
        key, shape = rng.choice(("shape", "dtype", "data_offsets")), [*tensors[name].shape]
        same, kind = _AS_LONG[tensors[name].itemsize], tensors[name].dtype.kind
        lies = {
            "shape": [[*shape, 1], [shape[0] + 1, *shape[1:]], [2**62, 4, *shape], None, "4",
                      [-1, *shape[1:]], [*[1] * 40, *shape]],
            "dtype": [dtype for dtype in same if dtype[0].lower() != kind] + ["Q4", "", 7, None],
            "data_offsets": [[0, 8], [-8, 0], [8, 0], [2**63, 2**63 + 8], [0, 2**62], [1, 9], [0],
                             "0", [0.0, 8.0], [True, 9], None, [0, 8, 16]],
        }[key]  # fmt: skip
    lie = rng.choice(lies)

    def change(header: dict[str, Any]) -> dict[str, Any]:
        header[name][key] = lie
        return header

    stored.rewrite_layout(path, change)
    return f"{name} {key} {lie!r}"


# for each item size, safetensors types of that size
_AS_LONG = {8: ("U64", "F64"), 4: ("F32", "I32"), 2: ("F16", "BF16"), 1: ("I8", "BOOL")}


def _layout(path: Path, rng: random.Random) -> str:
    """Write another safetensors header, or another length before it."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    text = rng.choice((
        *(text.encode() for text in TEXTS), b"\xff\xfe{", data[8:begin], b'{"__metadata__": 3}',
        b'{"__metadata__": {"megatron_r3": 3}}', b'{"tokens": null}', b'{"tokens": []}',
        b'{"__metadata__": {"megatron_r3": "{}", "crc32": "2745614147"}}',
        b'{"tokens": {"dtype": "I32"}}',
    ))  # fmt: skip
    lengths = [0, 1, 2**63 - 1, 2**64 - 1, len(data) - 8, len(data), 10**8 + 1]
    if text != data[8:begin]:
        lengths += [len(text)] * 9
    length = rng.choice(lengths)
    path.write_bytes(length.to_bytes(8, "little") + text + data[begin:])
    return f"{text[:60]!a}, with {length} as its length"


_OF_TENSORS: dict[str, Callable[[Tensors, StoreInfo, random.Random], str]] = {
    "value": _value, "another value": _value, "twice": _twice, "route": _route, "counts": _counts,
    "spans": _spans, "sizes": _sizes, "shape": _shape,
}  # fmt: skip
_OF_HEADERS: dict[str, Callable[[Path, random.Random], str]] = {
    "info": _info, "body": _body, "text": _text, "entry": _entry, "unknown key": _unknown,
    "layout": _layout,
}  # fmt: skip
