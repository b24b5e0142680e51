"""Which ids the chat template adds to a conversation, and which calls are read from a text."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from chat_model import END, TEMPLATE, tokenizer

from megatron_r3.record.chat_template import ChatTemplate

HI = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
LAST = "{% for m in messages %}{{ m.content }}{{ '!' if loop.last else '?' }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "last", "expected"),
    [
        (TEMPLATE, END, f"\n<|start|>user\nmore{END}\n<|start|>assistant\n"),
        (TEMPLATE, "x", f"{END}\n<|start|>user\nmore{END}\n<|start|>assistant\n"),
        (LAST, "x", None),  # what ends a message changes with what follows it
    ],
)
def test_only_what_is_new_is_rendered(template, last, expected, tmp_path):
    made = tokenizer(template)
    made.save_pretrained(tmp_path)
    loaded = ChatTemplate(tmp_path)
    (last_id,) = made(last)["input_ids"]
    ids = loaded.new_part([HI, {"role": "assistant", "content": "yes"}, MORE], 1, {}, last_id)
    assert (None if ids is None else made.decode(ids)) == expected


@pytest.mark.parametrize(
    ("template", "fits"),
    [
        (TEMPLATE, True),
        (LAST, False),
        (TEMPLATE.replace("| tojson }}</tool_call>", "}}</tool_call>"), False),  # no JSON
    ],
)
def test_tools_need_a_template_whose_calls_are_read(template, fits, tmp_path):
    tokenizer(template).save_pretrained(tmp_path)
    with nullcontext() if fits else pytest.raises(ValueError, match="does not write calls as JSON"):
        ChatTemplate(tmp_path).check_tools([TOOL])


def test_a_model_without_a_tokenizer_takes_ids_alone(tmp_path):
    template = ChatTemplate(tmp_path)
    assert template.text_of([1]) == ""
    for ask in (lambda: template.whole([HI], {}), lambda: template.ids_of("a")):
        with pytest.raises(
            ValueError, match="has no tokenizer: ask /v1/completions with token ids"
        ):
            ask()


@pytest.mark.parametrize("text", ["<tool_call>{</tool_call>", "<tool_call>{}</tool_call>", "plain"])
def test_a_call_that_cannot_be_read_stays_text(text, chat_model):
    message = ChatTemplate(chat_model[0]).message(text, [TOOL])
    assert message == {"role": "assistant", "content": text}
