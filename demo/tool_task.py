"""The demo's task for an agent: sort digits, for which the model may call a tool.

    <user> 3 1 2 <end> <model>  CALL 3 1 2 CLOSE <end>  <tool> 1 2 3 <end> <model>  1 2 3 <end>

CALL and CLOSE are what surrounds the digits in `<tool_call>{"name": "sort", "arguments": {"digits":
"312"}}</tool_call>`. CALL and CLOSE are one token each, and so is each digit. In the first training
a quarter of the conversations call the tool; in the others the model gives the digits back as they
came. The reward is the share of digits in the right place, so the policy learns to call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from demo.task import EOS, FIRST_DIGIT, VOCAB_SIZE

NUM_DIGITS = 8
MAX_ANSWER = NUM_DIGITS + 3
SEQ_LENGTH = 64
CALLS = 0.25  # the share of the first training's examples that call the tool
CALL, CLOSE = '<tool_call>{"name": "sort", "arguments": {"digits": "', '"}}</tool_call>'
USER, MODEL, TOOL = "<user>", "<model>", "<tool>"
TEMPLATE = """\
{%- for m in messages %}{{ {'user': '<user>', 'tool': '<tool>'}.get(m.role, '<model>') }}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{{ {"name": call.function.name, "arguments": call.function.arguments}
  | tojson }}</tool_call>
{%- endfor %}<end>
{%- endfor %}
{%- if add_generation_prompt %}<model>{% endif %}"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "sort",
            "parameters": {"type": "object", "properties": {"digits": {"type": "string"}}},
        },
    }
]
_FIXED = ["<pad>", "<bos>", "<end>", "=", *"0123456789", USER, MODEL, TOOL, CALL, CLOSE]
_NUMBER = {text: number for number, text in enumerate(_FIXED)}


def problem(index: int) -> str:
    """The digits of the problem with this number, which are the same in every process."""
    digits = np.random.default_rng(index).integers(0, 10, NUM_DIGITS)
    return "".join(map(str, digits.tolist()))


def example(index: int) -> tuple[list[int], list[bool]]:
    """The ids of a conversation of the first training, and which of them the model is to say."""
    digits = problem(index)
    parts = [(False, [USER, *digits, "<end>", MODEL])]
    if np.random.default_rng([index, 1]).random() < CALLS:
        parts += [
            (True, [CALL, *digits, CLOSE, "<end>"]),
            (False, [TOOL, *sorted(digits), "<end>", MODEL]),
            (True, [*sorted(digits), "<end>"]),
        ]
    else:
        parts += [(True, [*digits, "<end>"])]
    ids = [_NUMBER[text] for _, texts in parts for text in texts]
    return ids, [said for said, texts in parts for _ in texts]


async def solve(client: Any, prompt: Mapping[str, Any]) -> float:
    """The agent: runs the tool once if the model calls it; returns the share of right places."""
    history, (question,) = [*prompt["messages"]], prompt["messages"]
    text = ""
    for turn in range(2):
        answer = await client.chat.completions.create(model="any", messages=history, tools=TOOLS)
        said = answer.choices[0].message
        text = said.content or ""
        if turn or not said.tool_calls:
            break
        call = said.tool_calls[0]
        digits = str(json.loads(call.function.arguments).get("digits", ""))
        result = {"role": "tool", "tool_call_id": call.id, "content": "".join(sorted(digits))}
        history += [said.model_dump(exclude_none=True), result]
    right = "".join(sorted(question["content"]))
    if len(text) != len(right):
        return 0.0
    return float(np.mean([one == other for one, other in zip(text, right, strict=True)]))


def write_tokenizer(directory: Path) -> None:
    """Write the tokenizer and the chat template into a transformers directory."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    rest = [f"<{number}>" for number in range(len(_FIXED), VOCAB_SIZE)]
    vocabulary = {text: number for number, text in enumerate([*_FIXED, *rest])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.decoder = tokenizers.decoders.Fuse()
    made.add_tokens([USER, MODEL, TOOL, CALL, CLOSE, *rest])
    assert made.token_to_id("<end>") == EOS
    assert made.token_to_id("0") == FIRST_DIGIT
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", bos_token="<bos>", pad_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)


def write_prompts(path: Path, count: int, first: int) -> None:
    """Write JSON lines `{"messages": [...], "group": n}` of problems `first`, `first + 1`, ..."""
    lines = [
        json.dumps({"messages": [{"role": "user", "content": problem(first + i)}], "group": i})
        for i in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
