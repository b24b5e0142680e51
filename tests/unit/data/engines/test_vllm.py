"""Real vLLM responses (tests/data/vllm) are decoded; changed ones are refused.

Shape suffixes (docs/glossary.md): G, K, L, N, T.
"""

from __future__ import annotations

import base64
import copy
import io
import json
from pathlib import Path
from typing import Any

import engine_bodies as made
import numpy as np
import pytest

from megatron_r3.data import engines
from megatron_r3.data.engines.shape import EngineError, ModelShape
from megatron_r3.data.engines.vllm import decode_routes

DATA = Path(__file__).parents[3] / "data" / "vllm"
ALL = ModelShape(16, 4, (0, 1, 2, 3), 4)
DENSE0 = ModelShape(16, 4, (1, 2, 3), 4)
QWEN = "vllm-0.30.0-qwen3moe-bf16"
QWEN_DENSE0 = "vllm-0.30.0-qwen3moe-dense0-bf16"
DEEPSEEK = "vllm-0.30.0-deepseekv3-bf16"
REJECT = "reject-vllm-0.24.0-qwen3moe-fp32-all-zero"


def load(folder: str, name: str) -> dict[str, Any]:
    return json.loads((DATA / folder / f"{name}.json").read_text())


def decode(payload: dict[str, Any], shape: ModelShape = ALL) -> list:
    return engines.decode("vllm", payload["response"], payload["request"], shape, "request 7")


def decode_increments(payload: dict[str, Any], shape: ModelShape = ALL) -> list:
    return engines.decode_increments(
        "vllm", payload["response"], payload["request"], shape, "request 7"
    )


def npy(array: np.ndarray, pickle: bool = False) -> str:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=pickle)
    return base64.b64encode(stream.getvalue()).decode()


def rows_of(payload: dict[str, Any], choice: int = 0) -> np.ndarray:
    text = payload["response"]["choices"][choice]["routed_experts"]
    return np.load(io.BytesIO(base64.b64decode(text)))


def with_routes(payload: dict[str, Any], routed: Any, choice: int = 0) -> dict[str, Any]:
    payload = copy.deepcopy(payload)
    payload["response"]["choices"][choice]["routed_experts"] = routed
    return payload


@pytest.fixture
def two() -> dict[str, Any]:
    """One prompt of 12 tokens, two samples of 10: 21 rows each."""
    return load(QWEN, "14_p12_g10_n2")


@pytest.mark.parametrize(
    ("folder", "name", "shape", "prompts", "groups"),
    [
        (QWEN, "03_p5_g1", ALL, [5], [0]),
        (QWEN, "07_p200_g20_cold", ALL, [200], [0]),
        (QWEN, "14_p12_g10_n2", ALL, [12, 12], [0, 0]),
        (QWEN, "15_batch3_lists", ALL, [7, 19, 40], [0, 1, 2]),
        (QWEN, "19_chat_turn1", ALL, [38], [0]),
        (QWEN_DENSE0, "14_p12_g10_n2", DENSE0, [12, 12], [0, 0]),
        (QWEN_DENSE0, "23_generate_tito", DENSE0, [21], [0]),
        (DEEPSEEK, "14_p12_g10_n2", DENSE0, [12, 12], [0, 0]),
    ],
)
def test_real_responses(folder, name, shape, prompts, groups):
    payload = load(folder, name)
    samples = decode(payload, shape)
    assert [s.prompt_length for s in samples] == prompts
    assert [s.group for s in samples] == groups
    for sample, choice in zip(samples, payload["response"]["choices"], strict=True):
        response = choice["token_ids"]
        assert sample.tokens_N.dtype == np.int32
        assert sample.tokens_N[sample.prompt_length :].tolist() == response
        assert sample.logprobs_N.dtype == np.float32
        assert len(made.logprobs_of(sample)) == len(response)
        assert (made.logprobs_of(sample) < 0).all()
        rows = len(shape.moe_layers), len(sample.tokens_N) - 1, 4
        assert sample.routes.ids_LTK.shape == rows
        assert sample.routes.ids_LTK.dtype == np.uint8
        assert sample.routes.recorded_T.all()


@pytest.mark.parametrize(
    "path", sorted(DATA.glob("*/*.json")), ids=lambda p: f"{p.parent.name}-{p.stem[:2]}"
)
def test_every_file_has_its_rows_or_is_refused(path):
    payload = load(path.parent.name, path.stem)
    request, streamed = payload["request"], "_raw_text" in payload["response"]
    shape = ALL if path.parent.name in (QWEN, REJECT) else DENSE0
    refused = payload.get("status", 200) != 200 or streamed
    if refused or path.parent.name == REJECT:
        with pytest.raises(EngineError, match="request 7"):
            decode_increments(payload, shape)
        return
    params = request.get("sampling_params", {})
    start = request.get("routed_experts_prompt_start", params.get("routed_experts_prompt_start", 0))
    for one in decode_increments(payload, shape):
        rows = one.prompt_length + len(one.logprobs_G) - 1 - start
        assert (one.start, one.routes.num_rows) == (start, rows)
        assert len(one.tokens_N) == one.prompt_length + len(one.logprobs_G)


def test_values_are_what_the_server_sent(two):
    samples = decode(two)
    for index, sample in enumerate(samples):
        choice = two["response"]["choices"][index]
        assert (sample.routes.ids_LTK == rows_of(two, index).transpose(1, 0, 2)).all()
        expected = np.array(choice["logprobs"]["token_logprobs"], np.float32)
        assert (made.logprobs_of(sample) == expected).all()
    # the two samples share the rows of the prompt, but not those of sampled tokens
    ids = [sample.routes.ids_LTK for sample in samples]
    assert (ids[0][:, :12] == ids[1][:, :12]).all()
    assert (ids[0][:, 12:] != ids[1][:, 12:]).any()


def test_moe_layers_are_picked_by_their_hidden_index():
    payload = load(QWEN_DENSE0, "23_generate_tito")
    rows = rows_of(payload)
    assert not rows[:, 0].any()
    (sample,) = decode(payload, DENSE0)
    for trace_layer, hidden in enumerate(DENSE0.moe_layers):
        assert (sample.routes.ids_LTK[trace_layer] == rows[:, hidden]).all()


def test_moe_layers_alone_are_taken_as_they_are():
    payload = load(QWEN_DENSE0, "14_p12_g10_n2")
    expected = decode(payload, DENSE0)[0]
    got = decode(with_routes(payload, npy(rows_of(payload)[:, 1:])), DENSE0)[0]
    assert (got.routes.ids_LTK == expected.routes.ids_LTK).all()


def test_lists_arrays_and_wider_integers_are_the_same(two):
    expected = decode(two)[0].routes.ids_LTK
    rows = rows_of(two)
    forms = [rows, rows.tolist(), rows.astype(np.int32), npy(rows.astype(np.uint16))]
    forms.append(npy(np.asfortranarray(rows)))
    for form in forms:
        assert (decode(with_routes(two, form))[0].routes.ids_LTK == expected).all()


def test_choices_out_of_order_are_put_in_order():
    payload = load(QWEN, "15_batch3_lists")
    expected = [s.tokens_N.tolist() for s in decode(payload)]
    payload["response"]["choices"].reverse()
    assert [s.tokens_N.tolist() for s in decode(payload)] == expected


def test_rows_from_a_later_start_are_the_whole_ones():
    whole = decode(load(QWEN, "07_p200_g20_cold"))[0].routes.ids_LTK
    later = load(QWEN, "10_p200_g20_prefix_hit_start150")
    choice = later["response"]["choices"][0]
    routes = decode_routes(choice, 220, ALL, start=150)
    assert routes.ids_LTK.shape == (4, 69, 4)
    assert (np.sort(routes.ids_LTK[:, :49]) == np.sort(whole[:, 150:199])).mean() > 0.99
    with pytest.raises(EngineError, match="start at token 150: stitch"):
        decode(later)
    (increment,) = decode_increments(later)
    assert (increment.start, increment.prompt_length, increment.routes.num_rows) == (150, 200, 69)
    assert (increment.routes.ids_LTK == routes.ids_LTK).all()
    with pytest.raises(
        EngineError, match="69 rows of routes for 220 tokens; expected 219, from token 0"
    ):
        decode_routes(choice, 220, ALL)


def test_nested_start_of_generate_is_seen():
    payload = load(QWEN_DENSE0, "25_generate_tito_start180")
    with pytest.raises(EngineError, match="start at token 180"):
        decode(payload, DENSE0)
    choice = payload["response"]["choices"][0]
    assert decode_routes(choice, 209, DENSE0, start=180).num_rows == 28


def test_a_server_that_captured_nothing_is_refused():
    with pytest.raises(EngineError, match=r"did not capture routes.*vLLM 0\.22 to 0\.26 on CPU"):
        decode(load(REJECT, "14_p12_g10_n2"))
    ignored = load(REJECT, "25_generate_tito_start180")
    choice = ignored["response"]["choices"][0]
    with pytest.raises(EngineError, match="did not capture routes"):
        decode_routes(choice, 209, ALL, start=180)


@pytest.mark.parametrize(
    ("folder", "name"), [(QWEN, "22_stream"), (QWEN_DENSE0, "24_generate_tito_stream")]
)
def test_streams_are_refused(folder, name):
    payload = load(folder, name)
    for body in (payload["response"], payload["response"]["_raw_text"]):
        with pytest.raises(EngineError, match="request 7: a streamed response is not read"):
            engines.decode("vllm", body, payload["request"], ALL, "request 7")


def test_errors_of_the_server_are_passed_on():
    payload = load(QWEN, "12_p200_g5_start201_gt_P")
    with pytest.raises(EngineError, match="must be between 0 and the prompt length"):
        decode(payload)
    payload["response"] = {"detail": "Not Found"}
    with pytest.raises(EngineError, match="Not Found"):
        decode(payload)


def test_another_models_shape_is_refused():
    payload = load(QWEN_DENSE0, "14_p12_g10_n2")
    with pytest.raises(EngineError, match=r"did not capture routes.*token 0, hidden layer 0"):
        decode(payload, ALL)
    with pytest.raises(EngineError, match="hidden layer 1, which is dense"):
        decode(payload, ModelShape(16, 4, (2, 3), 4))
