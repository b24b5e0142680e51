"""Thousands of mutated bodies: each decodes to the same routes, or is refused by an EngineError.

A mutation that leaves valid routes may decode to other routes only if it changed the routes
themselves; then they are what an independent reading of the body says. Seeded, so that a fault
comes back.

Shape suffixes (docs/glossary.md): K, L, N, T.
"""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable
from typing import Any

import engine_bodies as made
import numpy as np
import pytest
from engine_mutations import mutated, mutated_object

from megatron_r3.data.engines import EngineError, decode, decode_increments, stitch

ROUNDS = 3000
ENGINES: dict[str, tuple[str, Callable]] = {
    "vllm": ("vllm", made.vllm),
    "vllm-python": ("vllm", made.vllm_python),
    "sglang": ("sglang", made.sglang),
    "sglang-openai": ("sglang", made.sglang_openai),
    "megatron": ("megatron", made.megatron),
    "megatron-0.17": ("megatron", lambda rows: made.megatron(rows, None)),
    "arrays": ("own", lambda rows: made.arrays(rows.tolist())),
}


def routes_in(body: Any, name: str) -> np.ndarray | None:
    """`[L, T, K]` ids of a body, read again without any of the decoders; None if unreadable."""
    try:
        if name.startswith("sglang"):
            text = (body.get("sglext") or body["meta_info"])["routed_experts"]
            flat = np.frombuffer(base64.b64decode(text), "<i4")
            return made.moe_ids(flat.reshape(-1, made.HIDDEN, made.TOPK))
        if name == "vllm-python":
            return made.moe_ids(np.asarray(body.outputs[0].routed_experts))
        if name == "arrays":
            return _of_layers(np.asarray(body[0]["routes"]))
        choice = body["choices"][0]
        if name.startswith("megatron"):
            routed = choice["moe_topk_indices"]
            return np.array(routed[1]["data"] if routed[0] == "ndarray" else routed).transpose(
                1, 0, 2
            )
        return _of_layers(np.load(io.BytesIO(base64.b64decode(choice["routed_experts"]))))
    except Exception:
        return None


def _of_layers(rows: np.ndarray) -> np.ndarray:
    return made.moe_ids(rows) if rows.shape[1] == made.HIDDEN else rows.transpose(1, 0, 2)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.filterwarnings("ignore")
def test_mutated_bodies(name):
    engine, make = ENGINES[name]
    rows, shape = made.made_rows(), made.SHAPE
    body, request = make(rows)
    expected = made.moe_ids(rows)
    mutate = mutated_object if name == "vllm-python" else mutated
    rng = random.Random(f"engines {name}")
    refused, other = [], 0
    for round_ in range(ROUNDS):
        wrong = mutate(body, rng)
        try:
            (sample,) = decode(engine, wrong, request, shape, "fuzz")
        except EngineError as error:
            refused.append(str(error))
            continue
        ids = sample.routes.ids_LTK
        assert ids.shape[1] == len(sample.tokens_N) - 1, round_
        assert ids.max() < made.EXPERTS, round_
        assert (np.sort(ids)[..., 1:] != np.sort(ids)[..., :-1]).all(), round_
        if ids.shape != expected.shape or not (ids == expected).all():
            assert (ids == routes_in(wrong, name)).all(), round_
            other += 1
    assert all("fuzz" in message and len(message) < 2000 for message in refused)
    assert ROUNDS // 4 < len(refused) < ROUNDS
    assert other  # the mutations reach the routes, and the independent reading was asked


@pytest.mark.parametrize("name", ENGINES)
def test_mutated_requests(name):
    engine, make = ENGINES[name]
    rows, shape = made.made_rows(), made.SHAPE
    body, request = make(rows)
    request = json.loads(json.dumps(request, default=lambda array: array.tolist()))
    request |= {"n": 1, "routed_experts_prompt_start": 0, "routed_experts_start_len": 0, "start": 0}
    rng = random.Random(f"requests {name}")
    decoded = 0
    for round_ in range(ROUNDS // 4):
        wrong = mutated(request, rng)
        try:
            samples = decode(engine, body, wrong, shape, "fuzz")
        except EngineError:
            continue
        decoded += 1
        assert (samples[0].routes.ids_LTK == made.moe_ids(rows)).all(), round_
    assert 0 < decoded < ROUNDS // 4


def test_mutated_increments():
    """A stitched conversation is whole, or refused."""
    rows = made.made_rows(29)
    tokens = np.arange(30, dtype=np.int32)
    spans = [(5, 9, 0), (13, 20, 8), (24, 30, 19)]
    rng = random.Random("increments")
    stitched = 0
    for round_ in range(ROUNDS):
        turns = []
        for prompt, end, start in spans:
            start = max(0, start + rng.choice((0, 0, 0, -3, 1)))
            ids = rows[start : end - 1 + rng.choice((0,) * 9 + (1,))].copy()
            if rng.random() < 0.1 and len(ids):
                ids[rng.randrange(len(ids)), 1] = [1, 2, 3, 4]
            said = tokens[:end].copy()
            if rng.random() < 0.1:
                said[rng.randrange(end)] = 99
            sequence = {
                "token_ids": said[prompt:],
                "logprobs": [-1.0] * (end - prompt),
                "routes": ids,
            }
            asked = {"prompt": said[:prompt], "start": start}
            turns.append((sequence, asked))
        rng.shuffle(turns)
        try:
            found = [decode_increments("own", *each, made.SHAPE, "fuzz")[0] for each in turns]
            found = found[: rng.choice((2, 3, 3))]
            sample = stitch(found, "fuzz")
        except EngineError:
            continue
        stitched += 1
        assert sample.routes.num_rows == len(sample.tokens_N) - 1, round_
        assert sample.routes.recorded_T.all(), round_
        for one in found:
            here = slice(one.start, one.start + one.routes.num_rows)
            assert (sample.routes.ids_LTK[:, here] == one.routes.ids_LTK).all(), round_
            assert (sample.tokens_N[: len(one.tokens_N)] == one.tokens_N).all(), round_
    assert 20 < stitched < ROUNDS
