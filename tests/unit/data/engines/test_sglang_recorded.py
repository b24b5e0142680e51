"""Responses of a real SGLang 0.5.23 (tests/data/sglang) are decoded; changed ones are refused.

Shape suffixes (docs/glossary.md): G, K, L, N, T, U, Y.
"""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any

import engine_bodies as made
import numpy as np
import pytest

from megatron_r3.data import engines
from megatron_r3.data.engines.shape import EngineError, ModelShape

DATA = Path(__file__).parents[3] / "data" / "sglang"
QWEN = "sglang-0.5.23-qwen3moe-bf16"
REJECT = "reject-sglang-0.5.23-qwen3moe-dense0-fp32"
ALL = ModelShape(16, 4, (0, 1, 2, 3), 4)
DENSE0 = ModelShape(16, 4, (1, 2, 3), 4)


def load(name: str, folder: str = QWEN) -> dict[str, Any]:
    return json.loads((DATA / folder / f"{name}.json").read_text())


def increments(payload: dict[str, Any], shape: ModelShape = ALL) -> list:
    return engines.decode_increments(
        "sglang", payload["response"], payload["request"], shape, "request 7"
    )


def items_of(payload: dict[str, Any]) -> list[dict[str, Any]]:
    response = payload["response"]
    return response if isinstance(response, list) else [response]


def rows_of(item: dict[str, Any]) -> np.ndarray:
    """The ids `[T, Y, K]` that the server sent, read without the decoder."""
    raw = base64.b64decode(item["meta_info"]["routed_experts"])
    return np.frombuffer(raw, "<i4").reshape(-1, 4, 4)


def with_rows(payload: dict[str, Any], rows_TYK: np.ndarray) -> dict[str, Any]:
    payload = copy.deepcopy(payload)
    items_of(payload)[0]["meta_info"]["routed_experts"] = made.int32_text(rows_TYK)
    return payload


# file, token of the first row, prompt lengths of the samples, groups of the samples
SAMPLES = [
    ("02_p5_g8", 0, [5], [0]),
    ("04_p200_g20_cold", 0, [200], [0]),
    ("06_p200_g20_prefix_hit_start150", 150, [200], [0]),
    ("07_p200_g5_start200", 200, [200], [0]),
    ("08_p12_g10_n2", 0, [12, 12], [0, 0]),
    ("09_batch3", 0, [7, 19, 40], [0, 1, 2]),
    ("10_mt_turn1", 0, [30], [0]),
    ("11_mt_turn2_start", 45, [55], [0]),
]
WITHOUT_ROUTES = {"12_stream", "13_no_routes"}


def test_every_file_is_used():
    assert {path.stem for path in (DATA / QWEN).iterdir()} == {
        s[0] for s in SAMPLES
    } | WITHOUT_ROUTES


@pytest.mark.parametrize(("name", "start", "prompts", "groups"), SAMPLES)
def test_values_are_what_the_server_sent(name, start, prompts, groups):
    payload = load(name)
    found = increments(payload)
    assert [one.prompt_length for one in found] == prompts
    assert [one.group for one in found] == groups
    for one, item in zip(found, items_of(payload), strict=True):
        assert one.tokens_N[one.prompt_length :].tolist() == item["output_ids"]
        logprobs = [entry[0] for entry in item["meta_info"]["output_token_logprobs"]]
        assert one.logprobs_G.tolist() == np.array(logprobs, np.float32).tolist()
        assert (one.start, one.routes.num_rows) == (start, len(one.tokens_N) - 1 - start)
        assert (one.routes.ids_LTK == rows_of(item).transpose(1, 0, 2)).all()
        assert one.routes.ids_LTK.dtype == np.uint8


def test_rows_of_the_prefix_cache_are_those_of_the_first_request():
    """The second request recomputes no row of the first 199 tokens; its rows begin at token 150."""
    whole, later = increments(load("04_p200_g20_cold"))[0], load("06_p200_g20_prefix_hit_start150")
    assert later["response"]["meta_info"]["cached_tokens"] == 199
    rows_LTK = increments(later)[0].routes.ids_LTK[:, :49]
    assert (rows_LTK == whole.routes.ids_LTK[:, 150:199]).all()
    assert (rows_LTK != whole.routes.ids_LTK[:, 151:200]).any()  # control: the next rows
    with pytest.raises(EngineError, match="start at token 150: stitch"):
        engines.decode("sglang", later["response"], later["request"], ALL, "request 7")


def test_samples_of_one_prompt_share_its_rows_alone():
    first, second = (one.routes.ids_LTK for one in increments(load("08_p12_g10_n2")))
    assert (first[:, :12] == second[:, :12]).all()
    assert (first[:, 12:] != second[:, 12:]).any()


def test_two_turns_are_one_rollout():
    turns = [load("10_mt_turn1"), load("11_mt_turn2_start")]
    rows_TYK = np.concatenate([rows_of(turn["response"]) for turn in turns])
    rollout = engines.stitch([increments(turn)[0] for turn in turns], "conversation")
    assert (rollout.routes.ids_LTK == rows_TYK.transpose(1, 0, 2)).all()
    assert rollout.routes.recorded_T.all()
    assert rollout.spans_U2.tolist() == [[30, 46], [55, 71]]
    late = copy.deepcopy(turns[1])  # a turn that begins one row too late leaves a hole
    late["request"]["routed_experts_start_len"] = 46
    late = with_rows(late, rows_of(late["response"])[1:])
    with pytest.raises(EngineError, match=r"conversation: .*token 45"):
        engines.stitch([increments(turns[0])[0], increments(late)[0]], "conversation")


def test_what_has_no_routes_is_refused():
    with pytest.raises(EngineError, match="a streamed response is not read"):
        increments(load("12_stream"))
    with pytest.raises(EngineError, match="no routed_experts; start the server with"):
        increments(load("13_no_routes"))


def test_a_dense_layer_that_the_server_takes_for_an_moe_layer_is_refused():
    """SGLang's qwen3_moe ignores `mlp_only_layers`: it makes every layer an MoE layer.

    The dense layer's weights are then loaded into no expert. So the server runs another model than
    the config's, and most log-probs are NaN, which the server sends as null.
    """
    finite = load("01_p1_g1", REJECT)
    with pytest.raises(EngineError, match="routes at hidden layer 0, which is dense in the model"):
        increments(finite, DENSE0)
    assert len(increments(finite, ALL)) == 1  # only the config tells that layer 0 is dense
    rows_TYK = rows_of(finite["response"]).copy()
    rows_TYK[:, 0] = 0  # what a server would send that runs layer 0 as a dense layer
    assert increments(with_rows(finite, rows_TYK), DENSE0)[0].routes.num_rows == 1
    for shape in (DENSE0, ALL):
        with pytest.raises(EngineError, match="a response token has no log-prob"):
            increments(load("08_p12_g10_n2", REJECT), shape)
