"""Prompts, and what is asked of each engine for them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from engine_server import engine, write_inputs

from megatron_r3.cli import main
from megatron_r3.collect.prompt_plan import Sampling
from megatron_r3.collect.prompts import Prompt, PromptError, read_prompts
from megatron_r3.collect.requests import build_request
from megatron_r3.data.store import RolloutStore


def read(tmp_path: Path, text: str) -> list[Prompt]:
    (tmp_path / "p.jsonl").write_text(text, encoding="utf-8")
    return read_prompts(tmp_path / "p.jsonl")


def test_every_form(tmp_path):
    lines = [
        {"prompt": [1, 2], "group": 7, "answer": "4"},
        {"prompt": "a\u2028text", "id": 9},
        {"messages": [{"role": "user", "content": "hi"}], "id": "fox"},
        {"prompt": [3]},
    ]
    text = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    prompts = read(tmp_path, text + "\n")
    assert [p.content for p in prompts] == [[1, 2], "a\u2028text", lines[2]["messages"], [3]]
    assert [p.tokens for p in prompts] == [[1, 2], None, None, [3]]
    assert [p.group for p in prompts[:2]] == [7, 9]
    assert 2**32 < prompts[2].group < 2**63
    assert prompts[3].group == 6  # its line, the empty ones counted
    assert prompts[3].where.endswith("p.jsonl, line 7")
    assert prompts[0].fields["answer"] == "4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no prompts"),
        ("{", "line 1: not JSON"),
        ('{"prompt": ' + "[" * 100_000, "line 1: JSON with more than 64 brackets"),
        ('{"prompt": [1], "x": ' + "9" * 5000 + "}", "line 1: not JSON"),
        ('{"prompt": [1.0]}', "token ids from 0 on"),
        ('{"prompt": [1], "group": "\\u001b[2J"}', r"got '\\x1b\[2J'$"),
        ("[1]", "`prompt` or `messages`"),
        ('{"prompt": [1], "messages": []}', "`prompt` or `messages`"),
        ('{"prompt": []}', "the prompt is empty"),
        ('{"prompt": ""}', "the prompt is empty"),
        ('{"prompt": [true]}', "token ids from 0 on"),
        ('{"prompt": [-1]}', "token ids from 0 on"),
        ('{"prompt": [2147483648]}', "token ids from 0 on"),
        ('{"messages": ["hi"]}', "a list of objects"),
        (
            '{"messages": [{"content": [{"type": "text"}, {"type": "image_url"}]}]}',
            "line 1: message 0, part 1 is of the type 'image_url'",
        ),
        ('{"prompt": [1], "group": "a"}', "`group` must be a whole number"),
        ('{"prompt": [1], "group": 9223372036854775808}', "`group` must be a whole number"),
        ('{"prompt": [1], "id": 1.5}', "`id` must be a whole number"),
        ('{"prompt": "\\ud800"}', "line 1: the prompt cannot be sent as JSON"),
        ('{"messages": [{"a": NaN}]}', "line 1: the prompt cannot be sent as JSON"),
        ('{"messages": [{"a": "\\udfff"}]}', "line 1: the prompt cannot be sent as JSON"),
        ('{"prompt": [1], "group": 1}\n{"prompt": [2]}', "line 2: group 1 is already the group of"),
    ],
)
def test_wrong_prompts(tmp_path, text, message):
    with pytest.raises(PromptError, match=message):
        read(tmp_path, text)


def test_what_sglang_is_asked():
    prompt = Prompt("line 1", 0, [1, 2], {})
    path, body = build_request("sglang", prompt, Sampling(8, 0.7, 0.9, seed=5), 77, "")
    assert path == "/generate"
    assert body == {
        "input_ids": [1, 2],
        "sampling_params": {
            "max_new_tokens": 8,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "sampling_seed": 77,
        },
        "return_logprob": True,
        "return_routed_experts": True,
        "stream": False,
    }
    for content in ("text", [{"role": "user", "content": "hi"}]):
        with pytest.raises(PromptError, match="line 1: with SGLang's /generate a prompt is"):
            build_request("sglang", Prompt("line 1", 0, content, {}), Sampling(8), None, "")


def test_seeds_depend_on_the_sample_alone():
    sampling = Sampling(8, seed=1)
    seeds = {sampling.seed_of(g, s, v) for g in range(20) for s in range(20) for v in range(2)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert Sampling(8, seed=2).seed_of(0, 0, 0) not in seeds
    assert Sampling(8).seed_of(0, 0, 0) is None


def generate(body: dict) -> dict:
    """What SGLang's /generate answers: routes as bare int32 of all layers."""
    prompt, sampled = body["input_ids"], [11, 12, 13]
    rng = np.random.default_rng(body["sampling_params"].get("sampling_seed"))
    rows = [[rng.permutation(16)[:4] for _ in range(4)] for _ in range(len(prompt) + 2)]
    return {
        "text": "abc",
        "output_ids": sampled,
        "meta_info": {
            "prompt_tokens": len(prompt),
            "completion_tokens": 3,
            "finish_reason": {"type": "length", "length": 3},
            "output_token_logprobs": [[-0.5, token, None] for token in sampled],
            "routed_experts": base64.b64encode(np.array(rows, "<i4").tobytes()).decode(),
        },
    }


def test_collecting_from_sglang(empty_folder):
    write_inputs(empty_folder, 3)
    arguments = "--engine sglang --model config.json --prompts prompts.jsonl --out store --n 2"
    with engine(answer=generate, pages={"/get_server_info": {"version": "0.5.18"}}) as server:
        command = ["rollouts", "collect", *arguments.split(), "--url", server.url]
        assert main([*command, "--reward", "rewards:length"]) == 0
    store = RolloutStore(["store"])
    assert (store.info.engine, store.info.engine_version) == ("sglang", "0.5.18")
    assert store.column("sample").tolist() == [0, 1] * 3
    assert store.column("reward").tolist() == [3, 3, 3.25, 3.25, 3.5, 3.5]
