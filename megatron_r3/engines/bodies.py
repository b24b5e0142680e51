"""What the requests and responses of all engines have in common: prompts, choices, options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_r3.engines.array import number_array, token_array
from megatron_r3.engines.shape import EngineError

__all__ = [
    "choices_in_order",
    "failure",
    "id_array",
    "option",
    "prompt_array",
    "prompts",
    "refuse_echo",
    "refuse_physical_ids",
    "sampled_logprobs",
    "whole_number",
]


def option(request: Mapping[str, Any], name: str, default: int) -> Any:
    """An option of a request, at its top level or in its `sampling_params`."""
    value = request.get(name)
    nested = request.get("sampling_params")
    if value is None and isinstance(nested, Mapping):
        value = nested.get(name)
    return default if value is None else value


def whole_number(value: Any, name: str, where: str, least: int = 0) -> int:
    """`value`, if it is a whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise EngineError(f"{where}: {name} is a whole number from {least} on; got {value!r:.80}")
    return value


def failure(response: Mapping[str, Any]) -> str | None:
    """What a server says that went wrong, or None."""
    failed = response.get("error") or response.get("detail")
    if not failed and response.get("object") == "error":  # SGLang's OpenAI routes
        failed = response
    if not failed:
        return None
    text = failed.get("message", failed) if isinstance(failed, Mapping) else failed
    return f"the server refused the request: {str(text)[:500]}"


def refuse_echo(request: Mapping[str, Any], where: str) -> None:
    """Refuse a response that repeats its prompt among what was sampled."""
    if request.get("echo"):
        raise EngineError(f"{where}: echo mixes prompt and response; ask with echo false")


def prompts(request: Mapping[str, Any], names: tuple[str, ...], where: str) -> list[Any]:
    """Token ids of each prompt of a request; None for a text or a chat.

    Args:
        request: the body that was sent.
        names: the fields that may hold prompts, the first that is there counts.
        where: what errors call the request.
    """
    if "messages" in request:
        return [None]
    prompt = next((request[name] for name in names if request.get(name) is not None), None)
    if isinstance(prompt, str):
        return [None]
    if not isinstance(prompt, (list, np.ndarray)) or not len(prompt):
        raise EngineError(f"{where}: the request has no prompt")
    if isinstance(prompt[0], (int, np.integer)):
        return [prompt]
    return [None if isinstance(one, str) else one for one in prompt]


def choices_in_order(choices: Any, expected: int, where: str) -> list[Mapping[str, Any]]:
    """The choices of a response, each once, by their index."""
    if not isinstance(choices, list) or not choices:
        raise EngineError(f"{where}: the response has no choices")
    if not all(isinstance(choice, Mapping) for choice in choices):
        raise EngineError(f"{where}: a choice is not an object")
    by_index = {
        whole_number(choice.get("index"), "a choice's index", where): choice for choice in choices
    }
    if len(choices) != expected or sorted(by_index) != list(range(len(choices))):
        raise EngineError(
            f"{where}: choices {[choice.get('index') for choice in choices[:20]]}; the request "
            f"asks for {expected}, 0 to {expected - 1}"
        )
    return [by_index[i] for i in range(expected)]


def id_array(value: Any, name: str, hint: str, where: str) -> np.ndarray:
    """Token ids that a response must hold; `hint` says how to ask for them."""
    if value is None:
        raise EngineError(f"{where}: no {name}; {hint}")
    return token_array(value, f"{where}: {name}")


def prompt_array(asked: Any, returned: Any, hint: str, where: str) -> np.ndarray:
    """The prompt's token ids: what was asked, which what was returned must not contradict."""
    if asked is None:
        return id_array(returned, "prompt_token_ids", hint, where)
    asked_P = token_array(asked, f"{where}: prompt")
    if returned is not None:
        got_P = token_array(returned, f"{where}: prompt_token_ids")
        if not np.array_equal(asked_P, got_P):
            raise EngineError(f"{where}: prompt_token_ids are not the prompt of the request")
    return asked_P


def sampled_logprobs(logprobs: Any, hint: str, where: str) -> np.ndarray:
    """Float32 log-probs of the sampled tokens, from either form that OpenAI's routes have."""
    values = None
    if isinstance(logprobs, Mapping):
        values = logprobs.get("token_logprobs")
        content = logprobs.get("content")
        if values is None and isinstance(content, list):
            if not all(isinstance(entry, Mapping) for entry in content):
                raise EngineError(f"{where}: a log-prob is not an object")
            values = [entry.get("logprob") for entry in content]
    if not isinstance(values, list) or not values:
        raise EngineError(f"{where}: no log-probs; {hint}")
    if any(value is None for value in values):
        raise EngineError(f"{where}: a response token has no log-prob")
    return number_array(values, f"{where}: log-probs")


def refuse_physical_ids(
    engine: str, version: str | None, first_logical: tuple[int, ...], where: str
) -> None:
    """Refuse routes of a server that balances experts (EPLB) and is not known to be new enough.

    Args:
        engine: its name.
        version: of the server; None if nobody knows.
        first_logical: the first version whose ids are logical, before experts were moved.
        where: what errors call the request.
    """
    parts = tuple(int(part) for part in (version or "").split(".")[:3] if part.isdigit())
    if len(parts) < 2 or parts < first_logical:
        raise EngineError(
            f"{where}: with EPLB {engine} {version or 'of unknown version'} returns physical "
            f"expert ids; logical ones from {'.'.join(map(str, first_logical))} on"
        )
