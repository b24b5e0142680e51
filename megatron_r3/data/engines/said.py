"""What a response holds beside tokens and routes: text, finish reason, weight versions, model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_r3.data.engines.body import refuse_half_way
from megatron_r3.data.engines.drawn import read_spans
from megatron_r3.data.engines.shape import EngineError
from megatron_r3.data.values import wrong_text

# Fields to which a server's parsers move pieces of the model's text; names differ by engine.
BESIDE_CONTENT = ("reasoning", "reasoning_content", "tool_calls", "function_call", "refusal")


@dataclass(frozen=True)
class Said:
    """What one choice of a response holds beside tokens and routes.

    Attributes:
        message: the model's message: `content` and the fields of `BESIDE_CONTENT`, without what
            else the engine sends in it (ids, log-probs). Empty if the engine sends no text, for
            example because it has no tokenizer.
        finish_reason: why the response ended, in the engine's words: "stop", "length".
        policies: the versions of the weights that sampled the choice, each once, as far as the
            engine reports them. Two versions mean that the weights changed in between.
        model: the name under which the server serves the model; empty if the response has none.
    """

    message: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: str = ""
    policies: tuple[str, ...] = ()
    model: str = ""


def read_said(
    body: Mapping[str, Any], choice: Mapping[str, Any], versions: Iterable[int] = ()
) -> Said:
    """The `Said` of one choice of a chat (which has `message`) or a completion (which has `text`).

    A completion's text becomes the message `{"content": "..."}`. The finish reason and the versions
    of the weights are in the choice or in its `meta_info` (SGLang); versions may also be beside the
    choices.

    Args:
        body: the response; where it has no choices, the choice itself.
        choice: the choice.
        versions: versions of the weights that the decoder has read already (Megatron).

    Raises:
        EngineError: content or finish reason is no text, a version is no short text or whole
            number, the message is no object or has audio, or the engine aborted the choice.
    """
    meta = choice.get("meta_info")
    meta = meta if isinstance(meta, Mapping) else {}
    reason = choice.get("finish_reason", meta.get("finish_reason"))
    refuse_half_way(reason)
    message = choice.get("message")
    if message is None:
        message = {} if choice.get("text") is None else {"content": choice["text"]}
    if not isinstance(message, Mapping):
        raise EngineError(f"its message must be an object; got {type(message).__name__}")
    if message.get("audio"):
        raise EngineError("the message has audio; rollouts are of text alone")
    message = {name: message[name] for name in ("content", *BESIDE_CONTENT) if name in message}
    text = message.get("content") or ""
    if isinstance(reason, Mapping):  # SGLang: {"type": "stop", "matched": 2}
        reason = reason.get("type")
    reason = reason or ""
    for name, value in (("text", text), ("finish reason", reason)):
        if not isinstance(value, str):
            raise EngineError(f"its {name} must be a text; got {type(value).__name__}")
    policies = [*_versions(body), *_versions(choice), *_versions(meta), *map(str, versions)]
    return Said(message, reason, tuple(dict.fromkeys(policies)), body.get("model") or "")


def _versions(fields: Mapping[str, Any]) -> list[str]:
    """The versions of weights in one object of a response of vLLM (0.32) or SGLang (0.5.23).

    `weight_version` is the newest one; `weight_versions` has `[{"version", "start", "end"}]`.
    """
    named = [version for version, _, _ in read_spans(fields.get("weight_versions"))]
    if fields.get("weight_version") is not None:
        named.insert(0, fields["weight_version"])
    versions = []
    for version in named:
        version = str(version) if type(version) is int else version
        if wrong := wrong_text(version):
            raise EngineError(f"the version of its weights must be {wrong}")
        versions.append(version)
    return versions
