"""Sampling masks and weight versions in responses, as the released engines write them.

The bodies are built after vLLM 0.32.0 (`entrypoints/scale_out/token_in_token_out/protocol.py`,
`outputs.py`) and SGLang 0.5.23 (`managers/tokenizer_manager.py`, `utils/weight_versions.py`).

Shape suffixes (docs/glossary.md): C, K, L, N, T.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_bodies import (
    LOGPROBS,
    PROMPT,
    RESPONSE,
    SHAPE,
    logprobs_of,
    made_rows,
    npy_text,
    sent,
    sglang_item,
    vllm_python,
)

from megatron_r3.data.engines import EngineError, ModelShape, decode, decode_increments, stitch
from megatron_r3.data.rollout import UNKNOWN_POLICY

ROWS = made_rows()
P = len(PROMPT)
# as SGLang sends them: the likeliest token first
MASKS = [[7, 21, 3], [22, 9], [1, 2, 5, 23], [24, 30]]
SORTED = [sorted(mask) for mask in MASKS]
OVER_ALL = [-2.5, -3.25, -4.0, -1.125]  # log-probs over the whole vocabulary
SPANS = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 4}]


def kept_of(rollout: Any) -> list[list[int]]:
    assert not rollout.kept.sizes_N[:P].any()
    return [rollout.kept.of(P + i).tolist() for i in range(len(RESPONSE))]


def vllm_generate(**choice: Any) -> tuple[Any, dict[str, Any]]:
    """A body of vLLM 0.32's /inference/v1/generate, whose log-probs name ids as numbers."""
    content = [
        {"token_id": token, "logprob": value, "rank": 1, "top_logprobs": []}
        for token, value in zip(RESPONSE, LOGPROBS, strict=True)
    ]
    body = {
        "request_id": "b2b8",
        "choices": [
            {
                "index": 0,
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": RESPONSE,
                "routed_experts": npy_text(ROWS),
                "sampling_mask": SORTED,
                "weight_versions": None,
                "logprobs": {"content": content},
                **choice,
            }
        ],
    }
    request = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4, "logprobs": 1}}
    return sent(body), request


def python_objects() -> tuple[Any, dict[str, Any]]:
    response, request = vllm_python(ROWS)
    response.outputs[0].sampling_mask = SimpleNamespace(token_ids=SORTED)
    response.outputs[0].weight_versions = [SimpleNamespace(**span) for span in SPANS]
    return response, request


def sglang(**meta: Any) -> tuple[Any, dict[str, Any]]:
    """A body of /generate with a mask; its `output_token_logprobs` are over all tokens."""
    masked = {
        "output_token_logprobs": [[v, t, None] for v, t in zip(OVER_ALL, RESPONSE, strict=True)],
        "output_token_sampling_mask": MASKS,
        "output_token_sampling_logprobs": LOGPROBS,
        "output_token_sampling_mask_length": len(MASKS),
    }
    request = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 4},
        "return_sampling_mask": True,
    }
    return sent(sglang_item(ROWS, **{**masked, **meta})), request


def support(values: list[float] = LOGPROBS) -> list[list[float]]:
    """Log-probs as `sampling_logprobs_mode` "support" sends them: one for each id of the mask."""
    return [
        [value if one == token else -9.5 for one in mask]
        for value, token, mask in zip(values, RESPONSE, MASKS, strict=True)
    ]


@pytest.mark.parametrize(
    ("engine", "body"),
    [
        ("vllm", vllm_generate()),
        ("vllm", python_objects()),
        ("sglang", sglang()),
        ("sglang", sglang(output_token_sampling_logprobs=support())),
    ],
    ids=["vllm", "vllm python", "sglang", "sglang support"],
)
def test_masks_become_kept_sets_with_their_log_probs(engine, body):
    (rollout,) = decode(engine, *body, SHAPE, "request")
    assert kept_of(rollout) == SORTED
    assert logprobs_of(rollout).tolist() == LOGPROBS


def test_without_a_mask_there_are_no_kept_sets():
    for engine, (response, request) in (
        ("vllm", vllm_generate(sampling_mask=None)),
        ("sglang", (sent(sglang_item(ROWS)), sglang()[1])),
    ):
        (rollout,) = decode(engine, response, request, SHAPE, "request")
        assert rollout.kept is None


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        (SORTED[:3], "sampling_mask: 3 lists for 4 response tokens"),
        ([*SORTED[:3], []], f"token {P + 3} was sampled, and has no kept set"),
        ([*SORTED[:3], [30]], f"token {P + 3}: its kept set lacks the token's id 24"),
        ([*SORTED[:3], [24, 24]], f"token {P + 3}: its kept set must have each id once"),
        ([*SORTED[:3], [24, -1]], "sampling_mask: token ids are whole numbers from 0 to"),
        ([*SORTED[:3], [24, 2**40]], "sampling_mask: token ids are whole numbers from 0 to"),
        ([*SORTED[:3], [24, True]], f"the list of token {P + 3} has an entry that is no id"),
        ([*SORTED[:3], [24, 2.0]], f"the list of token {P + 3} has an entry that is no id"),
        ([*SORTED[:3], 24], "sampling_mask: expected a list of ids for each response token"),
        ("AAAA", "sampling_mask: expected a list of ids for each response token"),
        ([*SORTED[:2], [23], SORTED[3]], f"token {P + 2}: its log-prob is -2; it must be 0"),
    ],
)
def test_masks_that_are_none_are_refused(masks, message):
    with pytest.raises(EngineError, match=message):
        decode("vllm", *vllm_generate(sampling_mask=masks), SHAPE, "request")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "output_token_sampling_logprobs must have an entry for each token"),
        (LOGPROBS[:3], "output_token_sampling_logprobs must have an entry for each token"),
        ([*LOGPROBS[:3], None], "a response token has no log-prob"),
        ([*LOGPROBS[:3], "x"], "output_token_sampling_logprobs: expected a flat list of numbers"),
        ([*support()[:3], [-1.0]], "output_token_sampling_logprobs: 1 log-probs for a mask of 2"),
    ],
)
def test_a_mask_without_its_log_probs_is_refused(values, message):
    body = sglang(output_token_sampling_logprobs=values)
    with pytest.raises(EngineError, match=message):
        decode("sglang", *body, SHAPE, "request")


@pytest.mark.parametrize(
    ("engine", "body"),
    [
        ("vllm", vllm_generate(weight_versions=SPANS)),
        ("vllm", python_objects()),
        ("sglang", sglang(weight_versions=SPANS, weight_version="4")),
    ],
    ids=["vllm", "vllm python", "sglang"],
)
def test_several_versions_become_spans_and_the_oldest_names_the_rollout(engine, body):
    (rollout,) = decode(engine, *body, SHAPE, "request")
    assert rollout.versions_C2.tolist() == [[P, 3], [P + 1, 4]]
    assert rollout.policy_version == 3


@pytest.mark.parametrize(
    "spans",
    [
        None,
        [],
        [{"version": "3", "start": 0, "end": 4}],
        [{"version": "default", "start": 0, "end": 4}],
        [{"version": "step-3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 4}],
    ],
)
def test_one_version_or_names_leave_the_policy_to_the_caller(spans):
    (rollout,) = decode("sglang", *sglang(weight_versions=spans), SHAPE, "request")
    assert rollout.versions_C2 is None
    assert rollout.policy_version == UNKNOWN_POLICY


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"start": 2}, r"weight_versions: the span \['4', 2, 4\] must begin at token 1"),
        ({"end": 3}, "weight_versions end at token 3 of the response, which has 4"),
        ({"end": 0}, "weight_versions: the span"),
        ({"start": "1"}, "weight_versions: the span"),
        ({"version": "2"}, "the versions of its version spans must ascend; got "),
    ],
)
def test_spans_that_do_not_fit_are_refused(changed, message):
    spans = [SPANS[0], {**SPANS[1], **changed}]
    with pytest.raises(EngineError, match=message):
        decode("sglang", *sglang(weight_versions=spans), SHAPE, "request")


def two_turns(**second: Any) -> list[Any]:
    """The first response as a turn, and a second turn that samples two more tokens."""
    (first,) = decode_increments("sglang", *sglang(weight_versions=SPANS), SHAPE, "turn 0")
    prompt, response = [*PROMPT, *RESPONSE, 40], [41, 42]
    item = sglang_item(made_rows(len(prompt) + 1), response)
    item["meta_info"] |= {
        "prompt_tokens": len(prompt),
        "output_token_sampling_mask": [[41, 2], [42, 1, 50]],
        "output_token_sampling_logprobs": [-0.5, -0.75],
        "weight_versions": [{"version": "6", "start": 0, "end": 2}],
        **second,
    }
    request = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2}}
    (later,) = decode_increments("sglang", sent(item), request, SHAPE, "turn 1")
    rows = later.routes.ids_LTK.copy()
    rows[:, : first.routes.num_rows] = first.routes.ids_LTK
    return [first, replace(later, routes=replace(later.routes, ids_LTK=rows))]


def test_turns_are_stitched_with_their_sets_and_versions():
    rollout = stitch(two_turns(), "conversation")
    sets = [rollout.kept.of(token).tolist() for token in range(len(rollout.tokens_N))]
    assert sets == [*([[]] * P), *SORTED, [], [2, 41], [1, 42, 50]]
    assert logprobs_of(rollout).tolist() == [*LOGPROBS, -0.5, -0.75]
    assert rollout.versions_C2.tolist() == [[P, 3], [P + 1, 4], [P + 5, 6]]
    assert rollout.policy_version == 3


def test_turns_that_do_not_fit_are_refused():
    with pytest.raises(EngineError, match="turn 1, choice 0: no sampling mask, while other"):
        stitch(two_turns(output_token_sampling_mask=None), "conversation")
    older = [{"version": "2", "start": 0, "end": 2}]
    with pytest.raises(EngineError, match="conversation: the versions of its version spans must"):
        stitch(two_turns(weight_versions=older), "conversation")
    unknown = stitch(two_turns(weight_versions=None), "conversation")
    assert unknown.versions_C2 is None


def test_a_real_response_with_masks_and_two_versions():
    """Recorded from SGLang 0.5.23, whose weights became version 4 after the first token."""
    data = Path(__file__).parents[3] / "data/sglang/sglang-0.5.23-qwen3moe-fp32"
    recorded = json.loads((data / "kept_and_versions.json").read_text())
    shape = ModelShape(16, 4, (0, 1, 2, 3), 4)
    (rollout,) = decode("sglang", recorded["response"], recorded["request"], shape, "recorded")
    assert rollout.versions_C2.tolist() == [[4, 3], [5, 4]]
    assert rollout.kept.sizes_N.max() <= 6
    meta = recorded["response"]["meta_info"]
    over_all = np.array([entry[0] for entry in meta["output_token_logprobs"]], np.float32)
    # Over fewer tokens each token is likelier; a token that alone was kept has the log-prob 0.
    assert (logprobs_of(rollout) >= over_all - 1e-6).all()
    assert (logprobs_of(rollout)[rollout.kept.sizes_N[4:] == 1] == 0).all()
    assert (logprobs_of(rollout) > over_all + 0.01).mean() > 0.5  # control: most log-probs differ


def test_log_probs_that_name_another_id_are_refused():
    body, request = vllm_generate()
    body["choices"][0]["logprobs"]["content"][2]["token_id"] = 5
    with pytest.raises(EngineError, match="the log-prob of token 8 belongs to id 5; the response"):
        decode("vllm", body, request, SHAPE, "request")


ODD: list[Any] = [
    None, True, False, 0, -1, 1.5, 2**31, 2**70, "", "3", "\x1b[2J", [], [[]], {}, [None], [[1]],
    [[1]] * 4, [["a"]] * 4, [[2**70]] * 4, [{}] * 4, [[[1]]] * 4, {"a": 1}, [[1, 2], 3, [4], [5]],
    float("nan"), [float("inf")] * 4, [True] * 4, [["0.5"]] * 4,
]  # fmt: skip


def decoded(engine: str, body: Any) -> tuple[Any, str]:
    """The rollout and "", or None and the error's message."""
    try:
        (rollout,) = decode(engine, *body, SHAPE, "request")
    except EngineError as error:
        return None, str(error)
    return rollout, ""


@pytest.mark.parametrize(
    "field", ["output_token_sampling_mask", "output_token_sampling_logprobs", "weight_versions"]
)
@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_odd_values_are_one_clear_error_or_as_good_as_missing(field, odd):
    """A body that is not refused decodes as if the field were missing."""
    bodies = [("sglang", sglang(**{field: odd}), sglang(**{field: None}))]
    if not field.endswith("logprobs"):
        name = field.replace("output_token_", "")
        bodies.append(("vllm", vllm_generate(**{name: odd}), vllm_generate(**{name: None})))
    for engine, body, without in bodies:
        rollout, error = decoded(engine, body)
        if rollout is None:
            assert error.startswith("request, choice 0: ")
            assert error.isprintable()
            continue
        (expected,) = decode(engine, *without, SHAPE, "request")
        assert (rollout.kept is None) == (expected.kept is None)
        assert (rollout.versions_C2, rollout.policy_version) == (None, UNKNOWN_POLICY)


@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize("key", ["version", "start", "end", None])
def test_odd_spans_are_one_clear_error_or_names(key, odd):
    span = odd if key is None else {**SPANS[1], key: odd}
    rollout, error = decoded("sglang", sglang(weight_versions=[SPANS[0], span]))
    if rollout is None:
        assert error.startswith("request")
        assert error.isprintable()
        return
    assert key == "version"  # a version that is no whole number is left out
    assert rollout.versions_C2 is None or odd == "3" or type(odd) is int
