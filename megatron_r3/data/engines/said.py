"""What a response says beside tokens and routes: the text, why it ended, by which weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_r3.data.engines.shape import EngineError
from megatron_r3.data.values import wrong_text

# What a server's parsers take out of the text that the model wrote; names differ by engine.
BESIDE_CONTENT = ("reasoning", "reasoning_content", "tool_calls", "function_call", "refusal")


@dataclass(frozen=True)
class Said:
    """What one choice of a response says.

    Attributes:
        message: what the model wrote, as the engine says it: `content`, and what `BESIDE_CONTENT`
            names. Nothing else that the engine may send with it (ids, log-probs). Empty if the
            engine sends no text, as one without a tokenizer does.
        finish_reason: why the response ended, in the engine's words: "stop", "length".
        policies: the versions of the weights that sampled the choice, each once, as far as the
            engine says them. Two of them mean that new weights came while it was sampled.
        model: the name under which the server has the model; empty if the response has none.
    """

    message: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: str = ""
    policies: tuple[str, ...] = ()
    model: str = ""


def read_said(
    choice: Mapping[str, Any], reason: Any, policies: Iterable[Any] = (), model: Any = None
) -> Said:
    """Read one choice, of a chat (`message`) or a completion (`text`).

    A completion's text becomes the message `{"content": "..."}`.

    Args:
        reason: the finish reason, a text, or an object with a `type` (SGLang).
        policies: versions of weights; None among them says nothing.
        model: as the response names it.

    Raises:
        EngineError: something here is no text, or the message has audio.
    """
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
    versions = [str(one) if type(one) is int else one for one in policies if one is not None]
    for version in versions:
        if wrong := wrong_text(version):
            raise EngineError(f"the version of its weights must be {wrong}")
    return Said(message, reason, tuple(dict.fromkeys(versions)), model or "")


def versions_in(fields: Mapping[str, Any]) -> list[Any]:
    """The versions of weights that vLLM (0.32) and SGLang (0.5.23) say of one choice.

    `weight_version` is the newest one, `weight_versions` has the spans of all
    (`drawn.version_spans` has looked at their form).
    """
    spans = fields.get("weight_versions") or []
    versions = [span.get("version") for span in spans if isinstance(span, Mapping)]
    return [fields.get("weight_version"), *versions]
