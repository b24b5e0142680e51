"""Every field of a request: recorded, known to change nothing, or refused by name.

tests/data/request_fields has all fields of the classes below, as the released engines have them.
"""

from __future__ import annotations

import ast
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from engine_server import DATA

from megatron_r3.collect.prompt_plan import Sampling
from megatron_r3.collect.prompts import Prompt
from megatron_r3.collect.request_fields import PLAIN, left_out, refuse_other_fields, settings_of
from megatron_r3.collect.requests import build_request
from megatron_r3.data.engines.shape import EngineError
from megatron_r3.data.store import RolloutStore
from tests.unit.collect.test_convert import convert, payload

FIELDS = DATA.parents[1] / "request_fields"
BUILD = Path(__file__).parents[3] / "build"
# the files below an installed engine, and the classes in them, that the recorded fields are of
CLASSES = {
    "vllm-0.30.0": (
        "vllm/lib/python3.*/site-packages/vllm",
        {
            "entrypoints/openai/chat_completion/protocol.py": {"ChatCompletionRequest"},
            "entrypoints/openai/completion/protocol.py": {"CompletionRequest"},
            "entrypoints/scale_out/token_in_token_out/protocol.py": {"GenerateRequest"},
            "sampling_params.py": {"SamplingParams"},
        },
    ),
    "sglang-0.5.23": (
        "sglang/sglang/srt",
        {
            "entrypoints/openai/protocol.py": {
                *("PDRoutingFields", "ChatCompletionRequest", "CompletionRequest")
            },
            "managers/io_struct.py": {"GenerateReqInput"},
            "sampling/sampling_params.py": {"SamplingParams"},
        },
    ),
}
# What no value of is known to change nothing: grammars, masks, code of one's own, other weights,
# what is no text, and prompts that are not in the request.
REFUSED = {
    "vllm-0.30.0": {
        *("allowed_token_ids", "thinking_token_budget", "trace_decode_token_ids", "suffix"),
        *("prompt_embeds", "features", "content_parts", "media_io_kwargs", "mm_processor_kwargs"),
    },
    "sglang-0.5.23": {
        *("json_schema", "regex", "ebnf", "structural_tag", "beam_width", "max_thinking_tokens"),
        *("custom_logit_processor", "watermark", "lora_id", "lora_path", "session_params"),
        *("input_embeds", "positional_embed_overrides", "image_data", "audio_data", "video_data"),
        *("suffix", "mm_hashes", "mm_content_hashes", "mm_processor_kwargs", "images_config"),
        *("video_config", "encoder_urls", "min_dynamic_patch", "max_dynamic_patch"),
        *("image_max_dynamic_patch", "video_max_dynamic_patch", "need_wait_for_mm_inputs"),
        *("num_items_assigned", "multi_item_delimiter_indices", "token_indices_to_pool"),
    },
}


def fields_of(engine: str) -> set[str]:
    return set(json.loads((FIELDS / f"{engine}.json").read_text()))


def is_refused(request: dict[str, Any]) -> bool:
    try:
        refuse_other_fields(request, "line 1")
    except EngineError:
        return True
    return False


@pytest.mark.parametrize("engine", CLASSES)
def test_every_field_of_an_engine_is_known(engine):
    fields = fields_of(engine)
    no_value = {"value": "that no engine has"}
    names = fields - {"sampling_params"}
    at_the_top = {name for name in names if is_refused({name: no_value})}
    inside = {name for name in names if is_refused({"sampling_params": [{}, {name: no_value}]})}
    assert at_the_top == inside == REFUSED[engine] | (PLAIN.keys() & fields)
    assert not is_refused(dict.fromkeys(fields))  # null is as good as not there
    for name in PLAIN.keys() & fields:
        assert not any(is_refused({name: value}) for value in PLAIN[name]), name
    assert is_refused({"a_field_of_next_year": 0})


@pytest.mark.parametrize("engine", CLASSES)
def test_the_recorded_fields_are_those_of_the_release(engine):
    pattern, files = CLASSES[engine]
    homes = list(BUILD.glob(pattern))
    if not homes:
        pytest.skip(f"{engine} is not installed in build/: its recorded fields are walked over")
    found: set[str] = set()
    for file, classes in files.items():
        for node in ast.walk(ast.parse((homes[0] / file).read_text())):
            if isinstance(node, ast.ClassDef) and node.name in classes:
                targets = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    assert {name for name in found if name[0] != "_"} == fields_of(engine)


TOOL = {"type": "function", "function": {"name": "answer", "parameters": {}}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1}, "1.1, which may .* or with 1$"),
        ({"logit_bias": {"5": 100}}, {"logit_bias": {}}, "'logit_bias' {'5': 100}"),
        ({"allowed_token_ids": [5, 6]}, {"allowed_token_ids": None}, "'allowed_token_ids'"),
        (
            {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "text"}},
            "json_object",
        ),
        ({"tool_choice": "required"}, {"tool_choice": "auto"}, "'none' or 'auto'"),
        ({"tools": [TOOL, STRICT]}, {"tools": [TOOL]}, "'tools'"),
        ({"guided_regex": "a+"}, {}, "'guided_regex'"),  # a name of older releases
    ],
)
def test_what_changes_the_sampled_tokens_is_refused(folder, capsys, wrong, right, message):
    one = payload("03_p5_g1") | {"reward": 1}
    changed, control = copy.deepcopy(one), copy.deepcopy(one)
    changed["request"] |= wrong
    control["request"] |= right
    assert convert([control, changed]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: raw.jsonl, line 2: the request has '")
    with pytest.raises(EngineError, match=message):
        settings_of(changed["request"], "line 1")
    assert not Path("store").exists()
    assert convert([control]) == 0


def test_what_the_models_own_file_sets_must_be_in_the_request(folder, capsys):
    one = payload("03_p5_g1") | {"reward": 1}
    defaults = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True}
    Path("generation_config.json").write_text(json.dumps(defaults))

    def converted(out: str, model: str = ".", **more: Any) -> str:
        line = copy.deepcopy(one)
        line["request"] |= more
        convert([line], "--model", model, "--out", out)
        return capsys.readouterr().err

    assert "line 1: the request leaves out top_k, and vllm then takes the 20 of" in converted("a")
    assert "leaves out repetition_penalty, and vllm then takes the 1.05" in converted("a", top_k=0)
    said = converted("a", top_k=0, repetition_penalty=1.0)
    assert said.startswith("requests leave out min_p, top_p: vllm took its own values")
    assert RolloutStore(["a"]).info.sampling.top_k == 0
    every = {"top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1.0}
    assert converted("b", **every) == ""
    Path("generation_config.json").write_text("{")
    assert "generation_config.json" in converted("c", "config.json", **every)
    assert "generation_config.json" in converted("c", **every)
    Path("generation_config.json").unlink()
    assert "min_p, repetition_penalty, top_k, top_p: vllm took its own" in converted("d")


def test_endpoints_that_take_no_defaults():
    assert left_out("vllm", {"prompt": [1]})
    assert left_out("sglang", {"messages": []})
    assert not left_out("vllm", {"token_ids": [1]})
    assert not left_out("sglang", {"input_ids": [1]})


@pytest.mark.parametrize("engine", ["vllm", "sglang", "megatron"])
@pytest.mark.parametrize("logprobs_of", [None, "processed"])
def test_collect_asks_for_nothing_else(engine, logprobs_of):
    prompt = Prompt("line 1", 0, [1, 2], {})
    sampling = Sampling(8, 0.7, 1.0, 20, logprobs_of=logprobs_of)
    _, body = build_request(engine, prompt, sampling, None if engine == "megatron" else 5, "m")
    settings = settings_of(body, "line 1")
    assert (settings.temperature, settings.top_k, settings.max_tokens) == (0.7, 20, 8)
    assert engine == "megatron" or not left_out(engine, body)
