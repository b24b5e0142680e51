"""Memory stays below a multiple of what was sent, whatever a header claims.

Shape suffixes (docs/glossary.md): K, L, T.
"""

from __future__ import annotations

import base64
import json
import struct
import tracemalloc
from typing import Any

import engine_bodies as made
import pytest

from megatron_r3.data.engines import EngineError, decode


def npy_claiming(descr: str, shape: str, data: bytes = b"\1" * 40, major: int = 1) -> str:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    size = struct.pack("<H" if major == 1 else "<I", len(header))
    return base64.b64encode(b"\x93NUMPY" + bytes([major, 0]) + size + header + data).decode()


HOSTILE = {
    "huge shape": npy_claiming("'|u1'", "(1099511627776, 48, 8)"),
    "huge shape, version 2": npy_claiming("'|u1'", "(1099511627776, 48, 8)", major=2),
    "huge and zero": npy_claiming("'|u1'", "(0, 1099511627776, 1099511627776)", b""),
    "negative": npy_claiming("'|u1'", "(-1, -40, 1)"),
    "overflowing": npy_claiming("'|u1'", "(18446744073709551617, 1, 40)"),
    "wide dtype": npy_claiming("'|V1099511627776'", "(1, 1, 1)"),
    "wide text": npy_claiming("'<U274877906944'", "(1, 1, 1)"),
    "object": npy_claiming("'|O'", "(5, 1, 1)"),
    "many axes": npy_claiming("'|u1'", "(" + "1, " * 200 + ")"),
    "deep header": npy_claiming("[" * 2000 + "]" * 2000, "(1, 1, 40)"),
    "long header": npy_claiming("'|u1'" + " " * 60000, "(1, 1, 40)"),
    "header that ends late": base64.b64encode(b"\x93NUMPY\2\0\xff\xff\xff\x7f{}").decode(),
    "version 9": base64.b64encode(b"\x93NUMPY\x09\0\x02\0{}").decode(),
    "deep list": json.loads("[" * 900 + "]" * 900),
    "one long text": [[["a" * 10**6, *[1] * 1000]]],
    "many texts": [[["a" * 100] * 1000] * 10] * 10,
    "many numbers": [[[2**62] * 1000] * 10] * 10,
}


@pytest.mark.filterwarnings("ignore")  # numpy warns of a header that looks like Python 2
@pytest.mark.parametrize("what", HOSTILE)
def test_memory_is_bounded_by_what_was_sent(what):
    hostile = HOSTILE[what]
    size = len(json.dumps(hostile))
    vllm_body, vllm_request = made.vllm(made.made_rows())
    vllm_body["choices"][0]["routed_experts"] = hostile
    megatron_body, megatron_request = made.megatron(made.made_rows())
    megatron_body["choices"][0]["moe_topk_indices"] = [
        "ndarray",
        {"data": hostile, "dtype": "int16"},
    ]
    for engine, body, request in (
        ("vllm", vllm_body, vllm_request),
        ("megatron", megatron_body, megatron_request),
    ):
        peak = peak_of(engine, body, request)
        assert peak < 2**20 + 16 * size, (what, peak, size)


def peak_of(engine: str, body: Any, request: dict[str, Any]) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(EngineError):
            decode(engine, body, request, made.SHAPE, "fuzz")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["vllm", "sglang", "arrays"])
def test_memory_of_large_good_bodies(name):
    """Decoding four megabytes of ids takes only a small multiple of their memory."""
    engine, make = made.ENGINES[name]
    rows = made.made_rows(50_009)
    body, request = make(rows[:9])
    tokens = list(range(1, 50_011))
    prompt, response = tokens[:-4], tokens[-4:]
    request["input_ids" if name == "sglang" else "prompt"] = prompt
    if name == "sglang":
        body = made.sglang_item(rows, response, prompt_tokens=len(prompt))
    elif name == "vllm":
        body["choices"][0] |= {"routed_experts": made.npy_text(rows), "token_ids": response}
        body["choices"][0]["prompt_token_ids"] = prompt
    else:
        body[0] |= {"routes": rows, "token_ids": response}
    sent = rows.size * (1 if name == "vllm" else 4)
    tracemalloc.start()
    (sample,) = decode(engine, body, request, made.SHAPE, "fuzz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (sample.routes.ids_LTK == made.moe_ids(rows)).all()
    assert peak < 8 * sent, (peak, sent)
