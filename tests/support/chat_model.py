"""A tiny MoE model with a tokenizer and a chat template, and an engine that computes with it.

The engine has the form of vLLM's server: `answer` makes a response's body of a request's body. It
returns the log-probs that the model gives to the sampled tokens, and the experts of its routers.

Shape suffixes (docs/glossary.md): K, L, N, T.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tiny_models import qwen
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_r3.data.engines.transformers import capture_routes
from proof.fuzz.bodies import Answer, Choice, completions

START, END = "<|start|>", "<|end|>"
# Like the templates of models that think: tools come first, the answer of a tool is a turn of its
# own, a thought is left out of the turns before the last one, and calls stand between two tags.
TEMPLATE = """\
{%- if tools %}<|start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write calls as <tool_call>{"name": ..., "arguments": ...}</tool_call><|end|>
{% endif %}{% for m in messages %}<|start|>{{ m.role }}
{% if m.role == 'assistant' and not loop.last and '</think>' in m.content -%}
{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ {"name": call.function.name, "arguments": call.function.arguments}
  | tojson }}</tool_call>
{%- endfor %}<|end|>
{% endfor %}{% if add_generation_prompt %}<|start|>assistant
{% endif %}"""


def tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Each byte is an id; two special ids begin and end a message."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    of_bytes = tokenizers.Tokenizer(models.BPE({one: i for i, one in enumerate(letters)}, []))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    of_bytes.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=of_bytes, eos_token=END, additional_special_tokens=[START]
    )
    made.chat_template = template
    return made


def write_chat_model(directory: Path, **change: Any) -> Any:
    """Write the model's directory; returns the model, in float32. `change` is of its config."""
    made = tokenizer()
    eos = made.convert_tokens_to_ids(END)
    model = qwen(
        **{"vocab_size": 260, "eos_token_id": eos, "max_position_embeddings": 2048, **change}
    )
    model.save_pretrained(directory)
    made.save_pretrained(directory)
    return model


class ComputedEngine:
    """Answers requests to vLLM's /v1/completions by the model.

    Args:
        model: a transformers model.
        made: its tokenizer; None if the engine is to have none.

    Attributes:
        answered: the prompt, and what was sampled, of each response.
        says: texts that the next responses are made of, in place of what the model would sample.
            The log-probs and routes are the model's own for these texts.
    """

    def __init__(self, model: Any, made: Any) -> None:
        self.model, self.tokenizer = model, made
        self.says: list[str] = []
        self.answered: list[tuple[list[int], list[int]]] = []
        self._lock = threading.Lock()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body of the response to a request for one sample."""
        with self._lock:  # hooks on the model's routers record one forward pass at a time
            return self._answer(body)

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["prompt"]
        if self.says:
            text = self.says.pop(0)
            sampled = self.tokenizer(text)["input_ids"]
            reason = "stop" if sampled[-1] == self.tokenizer.eos_token_id else "length"
        else:
            generator = torch.Generator().manual_seed(body.get("seed", 5) + len(prompt))
            number = int(torch.randint(3, 9, (1,), generator=generator))
            most = self.model.config.vocab_size - 10
            sampled = torch.randint(0, most, (number,), generator=generator).tolist()
            reason = "length"
        sampled = sampled[: body["max_tokens"]]
        self.answered.append((prompt, sampled))
        ids_LTK, logprobs_N = forward(self.model, [*prompt, *sampled])
        start = body.get("routed_experts_prompt_start", 0)
        rows = ids_LTK.transpose(1, 0, 2)[start:-1].astype(np.int32)
        choice = Choice(sampled, logprobs_N[len(prompt) :].tolist(), rows, reason=reason)
        made, _ = completions(Answer(prompt, prompt, [choice], body.get("model", "served")))
        tokenizer = self.tokenizer
        text = tokenizer and tokenizer.decode(sampled, skip_special_tokens=True)
        made["choices"][0]["text"] = text
        return made


@torch.inference_mode()
def forward(model: Any, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The experts `[L, N, K]` of all tokens, and the log-prob `[N]` of each; 0 for the first."""
    with capture_routes(model) as captured:
        logits = model(torch.tensor([ids])).logits[0].float()
        (ids_LTK,) = captured.take()
    logprobs = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return ids_LTK.numpy(), np.concatenate([[0], logprobs.numpy()]).astype(np.float32)
