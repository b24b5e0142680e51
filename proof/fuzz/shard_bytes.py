"""Damage to the bytes of a shard: noise, or impossible values under checksums that are right.

No rollout can have a forged value. So a reader that accepts the shard is wrong, unless the reader
does not use the value and everything that it gives is what was written.

Shape suffixes (docs/glossary.md): K, L, M, T, U.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from proof.fuzz.shard_extras import FORGERIES
from proof.fuzz.shard_parts import ShardFile

_WRAP = 2**62  # four of these add up to 2**64, which is 0 in 64 bits
ODD: list[Any] = [
    None, True, False, -1, 0, 2**31, 2**63, 2**70, -(2**63), 10**400, 1.5, 4.0, math.nan, math.inf,
    "", "4", "\x1b[2J", "\ud800", "a\nb", "x" * 5000, [], {}, [1], ["a"], [[1]], {"a": 1}, [None],
]  # fmt: skip


def changed_bytes(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Noise: what a disk, a network or an editor does."""
    changed = bytearray(data)
    begin = 8 + int.from_bytes(data[:8], "little")
    where = rng.choice((rng.randrange(len(data)), rng.randrange(begin), rng.randrange(8)))
    length = min(rng.choice((1, 2, 8, 64, 512)), len(data) - where)
    kind = rng.choice(("flip", "flip", "set", "noise", "zero", "cut", "append", "delete", "insert",
                       "move", "digit"))  # fmt: skip
    if kind == "flip":
        for _ in range(rng.choice((1, 1, 1, 2, 9))):
            changed[rng.randrange(where, len(data))] ^= 1 << rng.randrange(8)
    elif kind == "set":
        changed[where] = rng.choice((0, 1, 9, 0x22, 0x5B, 0x7B, 0x7F, 0x80, 0xFF))
    elif kind == "noise":
        changed[where : where + length] = rng.randbytes(length)
    elif kind == "zero":
        changed[where : where + length] = bytes(length)
    elif kind == "cut":
        del changed[where:]
    elif kind == "append":
        changed += rng.choice((b"\0", bytes(8), rng.randbytes(length), data))
    elif kind == "delete":
        del changed[where : where + length]
    elif kind == "insert":
        changed[where:where] = rng.randbytes(length)
    elif kind == "move":
        other = rng.randrange(len(data) - length + 1)
        changed[where : where + length] = data[other : other + length]
    else:  # another number in the header
        digits = [i for i in range(8, begin) if chr(data[i]).isdigit()]
        changed[rng.choice(digits)] = ord(rng.choice("0123456789-.e"))
    return bytes(changed), f"noise, {kind}: at byte {where} of {len(data)}"


def forged(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """A whole shard with one impossible thing in it, and what that is."""
    shard = ShardFile.of(data)
    name = rng.choice([*_FORGERIES])
    said = _FORGERIES[name](shard, rng)
    if isinstance(said, bytes):
        return said, name
    return shard.file(), f"{name}: {said}" if said is not None else name


# -- values of tensors


def _sampled(shard: ShardFile, rng: random.Random, want: int = 1) -> int:
    """A token that was sampled, or one that was not."""
    return int(rng.choice(np.flatnonzero(shard.tensors["response"] == want).tolist()))


def _logprob(shard: ShardFile, rng: random.Random) -> str:
    value = rng.choice((5.0, 1e-3, -9999.0, -95.0, -1e30, math.nan, math.inf, -math.inf))
    where = _sampled(shard, rng)
    shard.tensors["logprobs"][where] = value
    return f"{value} of token {where}"


def _logprob_outside(shard: ShardFile, rng: random.Random) -> str:
    value = rng.choice((math.nan, math.inf, -math.inf, -1.0, 5.0))
    shard.tensors["logprobs"][_sampled(shard, rng, 0)] = value
    return f"{value}"


def _token(shard: ShardFile, rng: random.Random) -> str:
    known = shard.body["info"].get("vocab_size") or 2**31
    value = rng.choice([-1, -(2**31), *([known, 2**31 - 1] if known < 2**31 else [])])
    shard.tensors["tokens"][rng.randrange(len(shard.tensors["tokens"]))] = value
    return f"{value} of {known}"


def _route(shard: ShardFile, rng: random.Random) -> str:
    ids_LTK = shard.tensors["routes"]
    layer = rng.randrange(len(ids_LTK))
    row = int(rng.choice(np.flatnonzero(shard.tensors["recorded"]).tolist()))
    if rng.random() < 0.5:
        ids_LTK[layer, row, 0] = ids_LTK[layer, row, 1]
        return "an expert twice"
    most = np.iinfo(ids_LTK.dtype).max
    value = rng.choice((shard.body["info"]["num_experts"], int(most)))
    ids_LTK[layer, row, rng.randrange(ids_LTK.shape[2])] = value
    return f"expert {value}"


def _flag(name: str) -> Callable[[ShardFile, random.Random], str]:
    def change(shard: ShardFile, rng: random.Random) -> str:
        where = rng.randrange(len(shard.tensors[name]))
        old = shard.tensors[name][where]
        # The turns say what `response` must be, so that its opposite is impossible. Nothing says
        # whether a row is recorded, so that only a value that is no truth value is.
        value = rng.choice((2, 255) if name == "recorded" else (2, 255, 1 - old))
        shard.tensors[name][where] = value
        return f"{value} at {where}"

    return change


def _counts(name: str) -> Callable[[ShardFile, random.Random], str]:
    def change(shard: ShardFile, rng: random.Random) -> str:
        counts_M = shard.tensors[name]
        total = int(counts_M.sum())
        kind = rng.choice(("wrap", "wrap", "negative", "more", "less", "zero", "moved", "huge"))
        if kind == "wrap":
            counts_M[:] = [_WRAP] * len(counts_M)
            if rng.random() < 0.5:  # choose the last count so that the sum in 64 bits is right
                last = (total - (len(counts_M) - 1) * _WRAP) % 2**64
                counts_M[-1] = last - 2**64 * (last >= 2**63)
        elif kind == "negative":
            counts_M[0], counts_M[1] = -counts_M[0] - 1, counts_M[1] + 2 * counts_M[0] + 1
        elif kind in ("more", "less"):
            counts_M[rng.randrange(len(counts_M))] += 1 if kind == "more" else -1
        elif kind == "zero":
            counts_M[0], counts_M[1] = 0, counts_M[0] + counts_M[1]
            counts_M[0] -= name == "num_turns"  # a rollout without turns is possible: take -1
        elif kind == "moved":  # the sum stays right, and turns lie outside of their rollout
            counts_M[0], counts_M[1] = 1, counts_M[0] + counts_M[1] - 1
            counts_M[0] -= 2 * (name == "num_turns")
        else:
            counts_M[rng.randrange(len(counts_M))] = rng.choice((2**63 - 1, 2**40, 10**9))
        return f"{kind} {counts_M.tolist()}"

    return change


def _turns(shard: ShardFile, rng: random.Random) -> str:
    turns_U2 = shard.tensors["turns"].reshape(-1, 2)
    turn = rng.randrange(len(turns_U2))
    kind = rng.choice(("back", "empty", "negative", "far", "short", "huge"))
    begin, end = turns_U2[turn].tolist()
    changed = {
        "back": (end, begin), "empty": (begin, begin), "negative": (-begin - 1, end),
        "far": (begin, end + 1), "short": (begin, end - 1), "huge": (begin, 2**31 - 1),
    }[kind]  # fmt: skip
    turns_U2[turn] = changed
    return f"{kind} {changed}"


def _name(shard: ShardFile, rng: random.Random) -> str:
    kind = rng.choice(("sample", "policy_version", "twice", "digest"))
    if kind == "twice":
        for name in ("sample", "policy_version", "group"):
            shard.tensors[name][1] = shard.tensors[name][0]
    elif kind == "digest" and "prompt_digest" in shard.tensors:
        shard.tensors["prompt_digest"][0] = -1
    else:
        kind = kind if kind != "digest" else "sample"
        shard.tensors[kind][rng.randrange(4)] = rng.choice((-1, -(2**63)))
    return kind


def _reward(shard: ShardFile, rng: random.Random) -> str:
    value = rng.choice((math.nan, math.inf, -math.inf))
    shard.tensors["reward"][rng.randrange(4)] = value
    return f"{value}"


# -- tensors


def _shape(shard: ShardFile, rng: random.Random) -> str:
    name = rng.choice([*shard.tensors])
    tensor = shard.tensors[name]
    kind = rng.choice(("longer", "shorter", "column", "empty", "lie", "huge", "negative", "many"))
    if kind == "longer":
        shard.tensors[name] = np.concatenate([tensor, tensor[:1]])
    elif kind == "shorter":
        shard.tensors[name] = tensor[:-1].copy()
    elif kind == "empty":
        shard.tensors[name] = tensor[:0].copy()
    else:
        shape = [*tensor.shape]
        lies = {
            "column": [*shape, 1], "lie": [shape[0] + 1, *shape[1:]], "huge": [2**62, 4, *shape],
            "negative": [-1, *shape[1:]], "many": [*[1] * 40, *shape],
        }  # fmt: skip
        shard.entries[name] = {"shape": lies[kind]}
    return f"{name} {kind}"


def _dtype(shard: ShardFile, rng: random.Random) -> str:
    name = rng.choice([*shard.tensors])
    same = {8: ("U64", "F64", "C64"), 4: ("F32", "I32", "U32"), 2: ("I16", "F16", "BF16")}
    kinds = same.get(shard.tensors[name].itemsize, ("I8", "BOOL", "F8_E5M2"))
    truth = {"f": "F32", "i": "I32", "u": "U32"}.get(shard.tensors[name].dtype.kind)
    dtype = rng.choice([kind for kind in kinds if kind != truth] + ["Q4", "", 7, None])  # type: ignore[list-item]
    shard.entries[name] = {"dtype": dtype}
    return f"{name} as {dtype!r}"


def _offsets(shard: ShardFile, rng: random.Random) -> str:
    name = rng.choice([*shard.tensors])
    offsets = rng.choice(([0, 8], [-8, 0], [8, 0], [2**63, 2**63 + 8], [0, 2**62], [1, 9], [0], "0",
                          [0.0, 8.0], [True, 9], None, [0, 8, 16]))  # fmt: skip
    shard.entries[name] = {"data_offsets": offsets}
    return f"{name} {offsets!r}"


def _names(shard: ShardFile, rng: random.Random) -> str:
    name = rng.choice([*shard.tensors])
    if rng.random() < 0.5:
        del shard.tensors[name]
        return f"{name} is missing"
    odd = rng.choice(("", "Tokens", "tokens ", "\x1b[31m", "__metadata__ "))
    shard.tensors = {odd if key == name else key: value for key, value in shard.tensors.items()}
    return f"{name} is called {odd!a}"


# -- the header

_IMPOSSIBLE = {
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


def _info(shard: ShardFile, rng: random.Random) -> str:
    name = rng.choice([key for key in shard.body["info"] if key in _IMPOSSIBLE])
    value = rng.choice(_IMPOSSIBLE[name])
    old = name in ("sampling", "vocab_size", "policy_stamp", "engine_policy")
    if old and shard.body["version"] == 2 and "block_crc32" not in shard.tensors:
        name, value = "topk", 0  # a version that knows none of these
    if name == "sampling" and isinstance(value, dict):
        value = {**(shard.body["info"][name] or {}), **value}
    if name == "vocab_size" and value == 3 and int(shard.tensors["tokens"].max()) < 3:
        value = -1
    shard.body["info"][name] = value
    return f"{name} {value!r:.80}"


def _no_info(shard: ShardFile, rng: random.Random) -> str:
    if rng.random() < 0.5:
        shard.body["info"] = rng.choice(ODD)
        return f"info {shard.body['info']!r:.80}"
    name = rng.choice(("num_experts", "topk", "moe_layers", "engine", "engine_version"))
    del shard.body["info"][name]
    return f"no {name}"


def _body(shard: ShardFile, rng: random.Random) -> str:
    name = rng.choice([key for key in shard.body if key != "info"])
    # every value of ODD is wrong here, but for `must_know`, which may be an empty list
    values = [value for value in ODD if value != [] or name != "must_know"]
    value = rng.choice([*values, 1, 99, "3"])
    if name == "number":
        value = value if value != shard.body["number"] or isinstance(value, bool) else 12
    if name == "crc32":
        shard.file()
        shard.body["crc32"] = value
        return _text(shard, f"crc32 {value!r:.80}")
    shard.body[name] = value
    return f"{name} {value!r:.80}"


def _sums(shard: ShardFile, rng: random.Random) -> str:
    shard.file()
    name = rng.choice([*shard.body["crc32"]])
    shard.body["crc32"][name] = rng.choice(ODD)
    return _text(shard, f"crc32 of {name} {shard.body['crc32'][name]!r:.80}")


def _text(shard: ShardFile, said: str) -> str:
    """Freeze the shard's own header, so that `file` does not put its checksums right again."""
    text = json.dumps(shard.body, sort_keys=True)
    shard.file = lambda: shard.file_of(text)  # type: ignore[method-assign]
    return said


def _not_json(shard: ShardFile, rng: random.Random) -> bytes:
    text = rng.choice((
        "", "null", "[]", "3", '"a"', "{", "{}", "[" * 100_000, '{"a":' * 100_000, "1" * 6000,
        "NaN", "{'a': 1}", "\ufeff{}", '{"version": 2e400}', '{"info": null}', "\0",
    ))  # fmt: skip
    return shard.file_of(text)


def _layout(shard: ShardFile, rng: random.Random) -> bytes:
    """The safetensors header itself."""
    data = shard.file()
    begin = 8 + int.from_bytes(data[:8], "little")
    text = rng.choice((
        b"", b"{}", b"[]", b"null", b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe{",
        b"\xef\xbb\xbf{}",
        b'{"__metadata__": 3}', b'{"__metadata__": {"megatron_r3": 3}}', b"9" * 6000,
        b'{"__metadata__": {"megatron_r3": "{}", "crc32": "2745614147"}}',
        b'{"tokens": null}', b'{"tokens": {"dtype": "I32"}}', b'{"tokens": []}',
    ))  # fmt: skip
    lengths = (len(text), 0, 1, 2**63 - 1, 2**64 - 1, len(data) - 8, len(data), 10**8 + 1)
    length = rng.choice((len(text), len(text), *lengths))
    return length.to_bytes(8, "little") + text + data[begin:]


def _metadata(shard: ShardFile, rng: random.Random) -> str:
    value = rng.choice(ODD)
    kind = rng.choice(("all", "megatron_r3", "crc32"))

    def edit(header: dict[str, Any]) -> None:
        if kind == "all":
            header["__metadata__"] = value
        else:
            header["__metadata__"][kind] = value

    shard.edit_header = edit
    return f"{kind} {value!r:.80}"


def _unknown(shard: ShardFile, rng: random.Random) -> str:
    """Add a key that a newer megatron-r3 may write. A reader that ignores it reads the same."""
    place = rng.choice(("body", "info", "sampling", "must_know"))
    if place == "must_know":
        shard.body["must_know"] = [rng.choice(("kept_sets", "\x1b[2J", 7, "x" * 10_000))]
    elif place == "body":
        shard.body["new\x1b[2J"] = rng.choice(ODD)
    elif place == "sampling" and isinstance(shard.body["info"].get("sampling"), dict):
        shard.body["info"]["sampling"]["new"] = rng.choice(ODD)
    else:
        shard.body["info"]["new"] = rng.choice(ODD)
    return place


_FORGERIES: dict[str, Callable[[ShardFile, random.Random], str | bytes | None]] = {
    "log-prob": _logprob, "log-prob outside the response": _logprob_outside, "token": _token,
    "route": _route, "response": _flag("response"), "recorded": _flag("recorded"),
    "num_tokens": _counts("num_tokens"), "num_turns": _counts("num_turns"), "turns": _turns,
    "name": _name, "reward": _reward, "shape": _shape, "dtype": _dtype, "offsets": _offsets,
    "tensor names": _names, "info": _info, "no info": _no_info, "body": _body, "sums": _sums,
    "not JSON": _not_json, "layout": _layout, "metadata": _metadata, "unknown keys": _unknown,
    **FORGERIES,
}  # fmt: skip
