"""vLLM's Python objects are decoded, or refused if something is missing.

Shape suffixes (docs/glossary.md): K, L, N, T.
"""

from types import SimpleNamespace

import engine_bodies as made
import pytest

from megatron_r3.data.engines import EngineError, decode, decode_increments


def test_python_outputs():
    rows = made.made_rows()
    response, request = made.vllm_python(rows)
    (sample,) = decode("vllm", response, request, made.SHAPE, "request 7")
    assert sample.tokens_N.tolist() == made.PROMPT + made.RESPONSE
    assert made.logprobs_of(sample).tolist() == made.LOGPROBS
    assert (sample.routes.ids_LTK == made.moe_ids(rows)).all()
    response.outputs[0].routed_experts = rows[4:]
    (one,) = decode_increments(
        "vllm", response, {"routed_experts_prompt_start": 4}, made.SHAPE, "request 7"
    )
    assert (one.routes.ids_LTK == made.moe_ids(rows)[:, 4:]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routed_experts": None}, "no routed_experts"),
        ({"logprobs": None}, r"SamplingParams\(logprobs=1\)"),
        ({"logprobs": [{}] * 4}, "has no log-prob"),
        ({"logprobs": [{}] * 3}, "3 log-probs for 4"),
        ({"token_ids": [[1]] * 4}, "is no id"),
        ({"index": None}, "index"),
    ],
)
def test_wrong_python_outputs_are_refused(change, message):
    response, request = made.vllm_python(made.made_rows())
    vars(response.outputs[0]).update(change)
    with pytest.raises(EngineError, match=f"request 7.*{message}"):
        decode("vllm", response, request, made.SHAPE, "request 7")


def test_python_objects_that_are_no_whole_response():
    response, request = made.vllm_python(made.made_rows())
    response.finished = False
    with pytest.raises(EngineError, match="not finished"):
        decode("vllm", response, request, made.SHAPE, "request 7")
    with pytest.raises(EngineError, match="outputs and prompt_token_ids"):
        decode("vllm", SimpleNamespace(), request, made.SHAPE, "request 7")
