"""Reads from a response: text, finish reason, model, versions of the weights, and kept sets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_r3.data.engines.checks import refuse_half_way
from megatron_r3.data.engines.shape import EngineError
from megatron_r3.data.kept import KeptSets
from megatron_r3.data.values import wrong_text
from megatron_r3.replay.words import quoted

# Fields to which a server's parsers move pieces of the model's text; names differ by engine.
BESIDE_CONTENT = ("reasoning", "reasoning_content", "tool_calls", "function_call", "refusal")
_WHOLE = re.compile("[0-9]{1,18}")


@dataclass(frozen=True)
class Said:
    """What one choice of a response holds beside tokens and routes.

    Attributes:
        message: the model's message, but only `content` and the fields of `BESIDE_CONTENT`. Empty
            if the engine sends no text, for example because it has no tokenizer.
        finish_reason: why the response ended, in the engine's words: "stop", "length".
        policies: the versions of the weights that sampled the choice, each once, if the engine
            reports versions. Several versions mean that new weights came during the response.
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

    A completion's text becomes the message `{"content": "..."}`. The finish reason is in the choice
    or in its `meta_info` (SGLang). The versions of the weights are there, or beside the choices.

    Args:
        body: the response, or a sample of SGLang's /generate.
        choice: an entry of the response's `choices`, or the same sample.
        versions: versions of the weights that the decoder has read already (Megatron).

    Raises:
        EngineError: the message, text, finish reason or a version has a type that it must not
            have; the message has audio; or the engine aborted the choice.
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
    """The versions of the weights in one object of a response of vLLM (0.32) or SGLang (0.5.23).

    `weight_version` is the newest version. `weight_versions` is a list of spans
    (`version_spans`).
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


def kept_sets(lists: Any, name: str, prompt_length: int, num_sampled: int) -> KeptSets | None:
    """The kept sets of a response's tokens, from a list of ids for each sampled token.

    Args:
        lists: the lists in the response; None gives None.
        name: the field that has the lists, for errors.
        prompt_length: how many tokens the prompt has; they get empty sets.
        num_sampled: how many lists are expected.

    Raises:
        EngineError: there is another number of lists, or an entry of a list is no token id.
    """
    if lists is None:
        return None
    if not isinstance(lists, list) or not all(isinstance(one, list) for one in lists):
        raise EngineError(f"{name}: expected a list of ids for each response token")
    if len(lists) != num_sampled:
        raise EngineError(f"{name}: {len(lists)} lists for {num_sampled} response tokens")
    # The types are checked first, because numpy would turn True into 1.
    for index, one in enumerate(lists):
        if not all(type(entry) is int for entry in one):
            token = prompt_length + index
            raise EngineError(f"{name}: the list of token {token} has an entry that is no id")
    try:
        return KeptSets.from_lists([*([[]] * prompt_length), *lists])
    except (ValueError, OverflowError) as error:
        raise EngineError(f"{name}: {error}") from error


def version_spans(spans: Any, num_sampled: int) -> np.ndarray | None:
    """The version of the weights that sampled each token: an int64 for each sampled token.

    Example: `[{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]`
    gives 3 3 4.

    Args:
        spans: `weight_versions` of vLLM (0.32) and SGLang (0.5.23); start and end count sampled
            tokens. None, or a version that is no whole number such as "default", gives None.
        num_sampled: how many tokens were sampled.

    Raises:
        EngineError: `spans` is no list, or has several spans that do not follow each other from the
            first token to the last.
    """
    parts = read_spans(spans)
    if not parts:
        return None
    if len(parts) == 1:
        parts[0][1:] = [0, num_sampled]
    end = 0
    for version, start, stop in parts:
        if type(start) is not int or type(stop) is not int or start != end or stop < start:
            raise EngineError(
                f"weight_versions: the span {quoted([version, start, stop])} must begin at token "
                f"{end} of the response, and must not end before it begins"
            )
        end = stop
    if end != num_sampled:
        raise EngineError(
            f"weight_versions end at token {end} of the response, which has {num_sampled} tokens"
        )
    numbers = [str(version) for version, _, _ in parts]
    if not all(map(_WHOLE.fullmatch, numbers)):
        return None
    lengths = [stop - start for _, start, stop in parts]
    return np.repeat(np.array([*map(int, numbers)], np.int64), lengths)


def read_spans(spans: Any) -> list[list[Any]]:
    """Version, start and end of each span of `weight_versions`, JSON or vLLM's Python objects.

    Raises:
        EngineError: `spans` is no list.
    """
    if not isinstance(spans or [], (list, tuple)):
        raise EngineError(f"weight_versions must be a list of spans; got {quoted(spans)}")
    return [
        [
            span.get(name) if isinstance(span, Mapping) else getattr(span, name, None)
            for name in ("version", "start", "end")
        ]
        for span in spans or []
    ]
