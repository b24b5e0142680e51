"""What the requests and responses of all engines have in common: prompts, choices, options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_r3.engines.array import number_array, token_array
from megatron_r3.engines.shape import EngineError
from megatron_r3.untrusted import quoted, said
from megatron_r3.values import MOST_TOKEN_ID

__all__ = [
    "choices_in_order",
    "failure",
    "id_array",
    "most_tokens",
    "option",
    "prompt_array",
    "prompt_contents",
    "prompts",
    "refuse_echo",
    "refuse_half_way",
    "refuse_other_model",
    "refuse_physical_ids",
    "sampled_logprobs",
    "whole_number",
]

_MOST_TOKENS = ("max_tokens", "max_completion_tokens", "max_new_tokens")
_TOKEN_ID = re.compile(r"token_id:(\d{1,10})")


def option(request: Mapping[str, Any], name: str, default: int) -> Any:
    """An option of a request, at its top level or in its `sampling_params`."""
    value = request.get(name)
    nested = request.get("sampling_params")
    if value is None and isinstance(nested, Mapping):
        value = nested.get(name)
    return default if value is None else value


def whole_number(value: Any, name: str, where: str, least: int = 0) -> int:
    """`value`, if it is a whole number from `least` on, of 31 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_TOKEN_ID:
        raise EngineError(f"{where}: {name} is a whole number from {least} on; got {quoted(value)}")
    return value


def most_tokens(request: Mapping[str, Any], where: str) -> int | None:
    """How many tokens a response may have, where the request says it.

    Engines disagree on which name counts where a request has two of them, so the larger number
    does. `sampling_params` may be a list with one entry for each prompt (SGLang): likewise.
    """
    nested = request.get("sampling_params")
    holders = [request, *(nested if isinstance(nested, list) else [nested])]
    said_so = [
        whole_number(holder[name], name, where)
        for holder in holders
        if isinstance(holder, Mapping)
        for name in _MOST_TOKENS
        if holder.get(name) is not None
    ]
    return max(said_so, default=None)


def failure(response: Mapping[str, Any]) -> str | None:
    """What a server says that went wrong, or None."""
    failed = response.get("error") or response.get("detail")
    if not failed and response.get("object") == "error":  # SGLang's OpenAI routes
        failed = response
    if not failed:
        return None
    text = failed.get("message", failed) if isinstance(failed, Mapping) else failed
    return f"the server refused the request: {said(text)}"


def refuse_other_model(response: Mapping[str, Any], request: Mapping[str, Any], where: str) -> None:
    """Refuse a response that names another model than its request does, where both name one."""
    asked, got = request.get("model"), response.get("model")
    if asked and got and asked != got:
        raise EngineError(
            f"{where}: a response of the model {quoted(got)}; {quoted(asked)} was asked for"
        )


def refuse_half_way(reason: Any, where: str) -> None:
    """Refuse what the engine gave up: it is not what the policy would have sampled."""
    message = reason.get("message") if isinstance(reason, Mapping) else None
    kind = reason.get("type") if isinstance(reason, Mapping) else reason
    if kind in ("abort", "error"):
        told = f": {said(message)}" if message else ""
        raise EngineError(f"{where}: the engine ended it with {kind!r}, half-way{told}")


def refuse_echo(request: Mapping[str, Any], where: str) -> None:
    """Refuse a response that repeats its prompt among what was sampled."""
    if request.get("echo"):
        raise EngineError(f"{where}: echo mixes prompt and response; ask with echo false")


def prompts(request: Mapping[str, Any], names: tuple[str, ...], where: str) -> list[Any]:
    """Token ids of each prompt of a request; None for a text or a chat.

    Arguments are those of `prompt_contents`.
    """
    contents = prompt_contents(request, names, where)
    return [None if _is_text(one) or _is_chat(one) else one for one in contents]


def prompt_contents(request: Mapping[str, Any], names: tuple[str, ...], where: str) -> list[Any]:
    """Each prompt of a request as it was sent: token ids, a text, or the messages of a chat.

    Args:
        request: the body that was sent.
        names: the fields that may hold prompts, the first that is there counts.
        where: what errors call the request.
    """
    if "messages" in request:
        messages = request["messages"]
        if not _is_chat(messages) or not all(isinstance(one, Mapping) for one in messages):
            raise EngineError(f"{where}: `messages` is a list of objects; got {quoted(messages)}")
        return [messages]
    prompt = next((request[name] for name in names if request.get(name) is not None), None)
    if _is_text(prompt):
        return [prompt]
    if not isinstance(prompt, (list, np.ndarray)) or not len(prompt):
        raise EngineError(f"{where}: the request has no prompt")
    return [prompt] if isinstance(prompt[0], (int, np.integer)) else list(prompt)


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, str)


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping)


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


def sampled_logprobs(
    logprobs: Any, response_G: np.ndarray, hint: str, where: str, first: int = 0
) -> np.ndarray:
    """Float32 log-probs of the sampled tokens, from either form that OpenAI's routes have.

    Where they name their tokens by id (vLLM: /inference/v1/generate always, the others with
    `return_tokens_as_token_ids`), these must be the tokens of the response. Names that are texts
    tell nothing: several tokens have one text.

    Args:
        logprobs: of a choice.
        response_G: the sampled tokens.
        hint: how to ask for log-probs.
        where: what errors call the choice.
        first: the index in the sequence of the first sampled token.
    """
    values, names = None, None
    if isinstance(logprobs, Mapping):
        values, names = logprobs.get("token_logprobs"), logprobs.get("tokens")
        content = logprobs.get("content")
        if values is None and isinstance(content, list):
            if not all(isinstance(entry, Mapping) for entry in content):
                raise EngineError(f"{where}: a log-prob is not an object")
            values = [entry.get("logprob") for entry in content]
            names = [entry.get("token") for entry in content]
    if not isinstance(values, list) or not values:
        raise EngineError(f"{where}: no log-probs; {hint}")
    if any(value is None for value in values):
        raise EngineError(f"{where}: a response token has no log-prob")
    _refuse_other_names(names, response_G, where, first)
    return number_array(values, f"{where}: log-probs")


def _refuse_other_names(names: Any, response_G: np.ndarray, where: str, first: int) -> None:
    if not isinstance(names, list):
        return
    ids = [_TOKEN_ID.fullmatch(name) if isinstance(name, str) else None for name in names]
    for index, (token, named) in enumerate(zip(response_G.tolist(), ids, strict=False)):
        if named is not None and int(named[1]) != token:
            raise EngineError(
                f"{where}: the log-prob of token {first + index} is that of id {named[1]}; the "
                f"response has id {token} there"
            )
    if any(ids) and len(ids) != len(response_G):
        raise EngineError(
            f"{where}: log-probs of {len(ids)} tokens; the response has {len(response_G)}"
        )


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
    given = (version or "").split(".")[:3]
    parts = tuple(int(part) for part in given if re.fullmatch("[0-9]{1,6}", part))
    if len(parts) < 2 or parts < first_logical:
        raise EngineError(
            f"{where}: with EPLB {engine} {said(version or 'of unknown version', 80)} returns "
            f"physical expert ids; logical ones from {'.'.join(map(str, first_logical))} on"
        )
