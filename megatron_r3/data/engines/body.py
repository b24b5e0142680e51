"""Reads what the bodies of all engines have in common: options, prompts, choices, arrays.

Errors raised here do not name the request: `decode_increments` adds the request's name
(`shape.naming`). Nothing is unpickled. The shape that a header claims is compared with the number
of bytes before an array is made.

Shape suffixes (docs/glossary.md): G, V.
"""

from __future__ import annotations

import binascii
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pybase64

from megatron_r3.data.engines.shape import EngineError
from megatron_r3.data.values import MOST_TOKEN_ID
from megatron_r3.replay.words import quoted, said

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
# By engine, the fields of a request that may hold the prompt; the first field that is set counts.
_PROMPTS = {
    "vllm": ("token_ids", "prompt"),
    "sglang": ("input_ids", "text", "prompt"),
    "megatron": ("prompt",),
}
_MOST_TOKENS = ("max_tokens", "max_completion_tokens", "max_new_tokens")
_TOKEN_ID = re.compile(r"token_id:(\d{1,10})")
NULL_LOGPROB = "a response token has no log-prob (null): sample the response again"
_NUMBERS = (int, float, np.integer, np.floating)
# The header of a .npy as numpy writes it. numpy's own reader parses the header as Python: that adds
# a fifth to the time of reading the routes, and recurses where brackets are nested.
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{ ?'descr': ?'(?P<descr>[|<>=]\w{1,15})', ?"
    rb"'fortran_order': ?(?P<fortran>True|False), ?"
    rb"'shape': ?\((?P<shape>[\d, ]{0,100})\),? ?\} *\n",
    re.DOTALL,
)


def option(request: Mapping[str, Any], name: str, default: int) -> Any:
    """An option of a request, from its top level or else from its `sampling_params`."""
    value = request.get(name)
    nested = request.get("sampling_params")
    if value is None and isinstance(nested, Mapping):
        value = nested.get(name)
    return default if value is None else value


def whole_number(value: Any, name: str, least: int = 0) -> int:
    """`value`, if it is a whole number from `least` to 2**31 - 1.

    Raises:
        EngineError: it is not; the message calls it `name`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_TOKEN_ID:
        most = MOST_TOKEN_ID
        raise EngineError(
            f"{name} must be a whole number from {least} to {most}; got {quoted(value)}"
        )
    return value


def most_tokens(request: Mapping[str, Any]) -> int | None:
    """How many tokens a response may have; None if the request has no limit.

    A request may give several limits: under several names, or (SGLang) in a list of
    `sampling_params` with one entry for each prompt. The largest limit counts, because engines
    disagree on which limit applies.

    Raises:
        EngineError: a limit is not a whole number from 0 to 2**31 - 1.
    """
    nested = request.get("sampling_params")
    holders = [request, *(nested if isinstance(nested, list) else [nested])]
    limits = [
        whole_number(holder[name], name)
        for holder in holders
        if isinstance(holder, Mapping)
        for name in _MOST_TOKENS
        if holder.get(name) is not None
    ]
    return max(limits, default=None)


def prompts(engine: str, request: Mapping[str, Any]) -> list[Any]:
    """The token ids of each prompt of a request; None for a prompt that is a text or a chat.

    Raises:
        EngineError: as `prompt_contents`.
    """
    contents = prompt_contents(engine, request)
    return [None if isinstance(one, str) or _is_chat(one) else one for one in contents]


def prompt_contents(engine: str, request: Mapping[str, Any]) -> list[Any]:
    """Each prompt of a request as it was sent: token ids, a text, or the messages of a chat.

    Raises:
        EngineError: the request has no prompt, or its `messages` are not a chat of texts alone.
    """
    names = _PROMPTS[engine]
    if "messages" in request:
        messages = request["messages"]
        if not _is_chat(messages) or not all(isinstance(one, Mapping) for one in messages):
            raise EngineError(f"`messages` must be a list of objects; got {quoted(messages)}")
        refuse_other_parts(messages)
        return [messages]
    prompt = next((request[name] for name in names if request.get(name) is not None), None)
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, (list, np.ndarray)) or not len(prompt):
        raise EngineError(f"the request has no prompt: give it one of messages, {', '.join(names)}")
    # [5, 6] is one prompt of two tokens; [[5, 6], [7]] and ["a", "b"] are two prompts
    return [prompt] if isinstance(prompt[0], (int, np.integer)) else list(prompt)


def refuse_other_parts(messages: list[Mapping[str, Any]]) -> None:
    """Refuse a chat with images, audio or files: the trainer would take their tokens for text.

    Raises:
        EngineError: naming the message and its part.
    """
    for number, message in enumerate(messages):
        content = message.get("content")
        for index, part in enumerate(content if isinstance(content, list) else []):
            # vLLM takes parts without a type: {"text": "a"}, and {"text": "a", "image_url": "b"}
            fields = part if isinstance(part, Mapping) else {}
            kind = fields.get("type") or next((name for name in fields if name != "text"), "text")
            if kind not in _TEXT_PARTS:
                raise EngineError(
                    f"message {number}, part {index} is of the type {quoted(kind)}: only parts of "
                    "text can be trained on, no images, audio or files"
                )


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping)


def choices_in_order(choices: Any, expected: int) -> list[Mapping[str, Any]]:
    """The choices of a response, each once, in the order of their `index`.

    Raises:
        EngineError: there are not `expected` choices, numbered from 0.
    """
    if not isinstance(choices, list) or not choices:
        raise EngineError("the response has no choices")
    if not all(isinstance(choice, Mapping) for choice in choices):
        raise EngineError("a choice is not an object")
    by_index = {whole_number(choice.get("index"), "a choice's index"): choice for choice in choices}
    if len(choices) != expected or sorted(by_index) != list(range(len(choices))):
        raise EngineError(
            f"the response has {len(choices)} choices, the first ones with the indices "
            f"{[choice.get('index') for choice in choices[:20]]}; the request asks for {expected}, "
            "numbered from 0"
        )
    return [by_index[i] for i in range(expected)]


def id_array(value: Any, name: str, hint: str) -> np.ndarray:
    """The ids of the sampled tokens, int32.

    Args:
        hint: the advice in the error about a `value` of None.

    Raises:
        EngineError: there are none, or one is not a whole number from 0 to 2**31 - 1.
    """
    if value is None:
        raise EngineError(f"no {name}; {hint}")
    refuse_none_sampled(value, name)
    return token_array(value, name)


def refuse_none_sampled(value: Any, name: str) -> None:
    """Refuse an empty list of sampled tokens.

    Raises:
        EngineError: the list is empty.
    """
    if isinstance(value, (list, tuple)) and not value:
        raise EngineError(
            f"{name} is empty: no token was sampled; ask for at least 1 (max_tokens; SGLang's "
            "/generate: max_new_tokens), and leave out a request that ended before its first token"
        )


def prompt_array(asked: Any, returned: Any, hint: str) -> np.ndarray:
    """The prompt's token ids, int32, from the request, or else from the response.

    Args:
        asked: the prompt of the request; None for a text or a chat.
        returned: the prompt's ids in the response; None if the response has none.
        hint: how to ask the engine for the prompt's ids.

    Raises:
        EngineError: neither has the ids, or the two differ.
    """
    if asked is None and returned is None:
        raise EngineError(f"no prompt_token_ids; {hint}")
    if asked is None:
        return token_array(returned, "prompt_token_ids")
    prompt = token_array(asked, "prompt")
    if returned is None or (type(asked) is type(returned) is list and asked == returned):
        return prompt  # lists are compared in a moment, arrays have to be made
    if not np.array_equal(prompt, token_array(returned, "prompt_token_ids")):
        raise EngineError(
            "prompt_token_ids are not the prompt of the request: the server cut or changed the "
            "prompt, or this response belongs to another request"
        )
    return prompt


def sampled_logprobs(
    logprobs: Any, response_G: np.ndarray, hint: str, prompt_length: int
) -> np.ndarray:
    """Float32 log-probs `[G]` of the sampled tokens, from either of the two forms in OpenAI's API.

    The forms are `{"token_logprobs": [-0.5], "tokens": ["token_id:9"]}` (completions) and
    `{"content": [{"logprob": -0.5, "token": "token_id:9"}]}` (chat). Where the log-probs name their
    tokens by id (vLLM: /inference/v1/generate always, other endpoints with
    `return_tokens_as_token_ids`), the ids must be the ids of the response. Names that are texts are
    not compared, because several tokens can have the same text.

    Args:
        logprobs: the `logprobs` of a choice.
        response_G: the sampled tokens.
        hint: how to ask for log-probs.
        prompt_length: the index of the first sampled token in the sequence, for errors.

    Raises:
        EngineError: a log-prob is missing, is no number, or belongs to another token.
    """
    values, names = None, None
    if isinstance(logprobs, Mapping):
        values, names = logprobs.get("token_logprobs"), logprobs.get("tokens")
        content = logprobs.get("content")
        if values is None and isinstance(content, list):
            if not all(isinstance(entry, Mapping) for entry in content):
                raise EngineError("a log-prob is not an object")
            values = [entry.get("logprob") for entry in content]
            # vLLM 0.32's /inference/v1/generate has the id itself: {"token_id": 9, "logprob": -0.5}
            names = [entry.get("token", f"token_id:{entry.get('token_id')}") for entry in content]
    if not isinstance(values, list) or not values:
        raise EngineError(f"no log-probs; {hint}")
    if None in values:  # JSON has no NaN: some servers write null
        raise EngineError(NULL_LOGPROB)
    _refuse_other_names(names, response_G, prompt_length)
    return number_array(values, "log-probs")


def _refuse_other_names(names: Any, response_G: np.ndarray, prompt_length: int) -> None:
    if not isinstance(names, list) or names == [f"token_id:{i}" for i in response_G.tolist()]:
        return
    ids = [_TOKEN_ID.fullmatch(name) if isinstance(name, str) else None for name in names]
    for index, (token, named) in enumerate(zip(response_G.tolist(), ids, strict=False)):
        if named is not None and int(named[1]) != token:
            raise EngineError(
                f"the log-prob of token {prompt_length + index} belongs to id {named[1]}; the "
                f"response has id {token} there"
            )
    if any(ids) and len(ids) != len(response_G):
        raise EngineError(f"log-probs of {len(ids)} tokens; the response has {len(response_G)}")


def integer_array(value: Any, name: str) -> np.ndarray:
    """An integer array of three axes, from base64 of a `.npy`, nested lists, or an array.

    Raises:
        EngineError: `value` is no such array; the message calls it `name`.
    """
    if isinstance(value, str):
        array = _npy_array(_decoded(value, name), name)
    else:
        array = _integers(_plain(value, name), name)
    if array.ndim != 3:
        raise EngineError(f"{name}: routes must be [tokens, layers, topk]; got shape {array.shape}")
    return array


def bare_array(text: Any, dtype: str, name: str) -> np.ndarray:
    """A flat array from base64 of its bytes, which have no header with shape or dtype.

    Raises:
        EngineError: the text is not base64 of whole elements.
    """
    raw = _decoded(text, name)
    if len(raw) % np.dtype(dtype).itemsize:
        raise EngineError(f"{name}: {len(raw)} bytes are no whole number of {dtype} values")
    return np.frombuffer(raw, dtype)


def shaped_array(text: Any, dtype: str, shape: Any, name: str) -> np.ndarray:
    """An integer array of three axes, from base64 of its bytes and a shape sent beside them.

    Raises:
        EngineError: the text is not base64, or the shape does not fit the number of bytes.
    """
    flat = bare_array(text, dtype, name)
    is_shape = isinstance(shape, (list, tuple)) and all(type(axis) is int for axis in shape)
    # math.prod, because Python's integers do not overflow
    if not is_shape or len(shape) != 3 or min(shape) < 0 or math.prod(shape) != len(flat):
        raise EngineError(
            f"{name}: routes must be [tokens, layers, topk]; got {len(flat)} ids for the shape "
            f"{quoted(shape, 60)}"
        )
    return _shaped(flat, tuple(shape), "C", name)


def _shaped(flat: np.ndarray, shape: tuple[int, ...], order: Any, name: str) -> np.ndarray:
    try:
        return flat.reshape(shape, order=order)
    except ValueError as error:  # (0, 2**40, 2**40) is empty, and numpy still has no such array
        raise EngineError(f"{name}: no array can have its shape ({error})") from error


def token_array(value: Any, name: str) -> np.ndarray:
    """Token ids as int32.

    Raises:
        EngineError: `value` is not a list of at least one whole number from 0 to 2**31 - 1.
    """
    array = _integers(_plain(value, name), name)
    if array.ndim != 1 or not array.size or array.min() < 0 or array.max() > MOST_TOKEN_ID:
        expected = f"a list of at least one number from 0 to {MOST_TOKEN_ID}"
        raise EngineError(f"{name}: token ids must be {expected}")
    return array.astype(np.int32)


def number_array(value: Any, name: str) -> np.ndarray:
    """Numbers of a list as float32; a number that is too large for float32 becomes infinite.

    Raises:
        EngineError: `value` is not a flat list of numbers.
    """
    array_V = _plain(value, name)
    if array_V.ndim != 1 or array_V.dtype.kind not in "iuf":
        got = _kinds(array_V) if array_V.ndim == 1 else f"{array_V.ndim} axes"
        raise EngineError(f"{name}: expected a flat list of numbers; got {got}")
    with np.errstate(over="ignore"):
        return array_V.astype(np.float32)


def _decoded(text: Any, name: str) -> bytes:
    if not isinstance(text, str):
        raise EngineError(f"{name}: expected base64 text; got {type(text).__name__}")
    try:
        return pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise EngineError(f"{name}: not whole base64 ({_short(error)})") from error


def _npy_array(raw: bytes, name: str) -> np.ndarray:
    """The integers in the bytes of a `.npy` file; the array is a view of these bytes."""
    broken = f"{name}: not a whole .npy of numbers"
    header = _NPY.match(raw)
    if header is None:
        raise EngineError(f"{broken} (it begins with {_short(raw[:120])})")
    try:
        dtype = np.dtype(header["descr"].decode())
        shape = tuple(int(axis) for axis in header["shape"].split(b",") if axis.strip())
    except (TypeError, ValueError) as error:
        raise EngineError(f"{broken} ({_short(error)})") from error
    if dtype.kind not in "iu":
        raise EngineError(f"{name}: ids must be integers; got {_short(dtype)}")
    # math.prod, because Python's integers do not overflow: in int64 the shape (2**32, 2**32) would
    # have 0 elements
    expected, got = math.prod(shape) * dtype.itemsize, len(raw) - header.end()
    if expected != got:
        raise EngineError(f"{broken} ({got} bytes; its header says {shape} of {dtype})")
    flat = np.frombuffer(raw, dtype, offset=header.end()) if got else np.empty(0, dtype)
    return _shaped(flat, shape, "F" if header["fortran"] == b"True" else "C", name)


def _plain(value: Any, name: str) -> np.ndarray:
    """`value` as an array; lists that hold anything but numbers become an array of objects."""
    if isinstance(value, (list, tuple)):
        return _from_lists(value, name)
    if not hasattr(value, "__array__"):
        raise EngineError(f"{name}: expected a list or an array; got {type(value).__name__}")
    try:
        return np.asarray(value)
    except Exception as error:  # another library's array may raise anything
        raise EngineError(f"{name}: not an array of numbers ({_short(error)})") from error


def _from_lists(value: list[Any] | tuple[Any, ...], name: str) -> np.ndarray:
    uneven = f"{name}: not an even table of numbers"
    try:
        # Without dtype=object, np.array([["a" * 10**6, 1, 2]]) would be three texts of a million
        # characters each, because numpy pads every text to the longest one.
        objects = np.array(value, dtype=object)
    except (ValueError, OverflowError, RecursionError) as error:
        raise EngineError(f"{uneven} ({_short(error)})") from error
    if objects.ndim > 8:  # `flat`, used below, fails above 32 axes
        raise EngineError(f"{uneven} ({objects.ndim} axes)")
    kinds = set(map(type, objects.flat))
    if kinds & {list, tuple}:  # [[1], [2, 3]] is an array of two lists
        raise EngineError(f"{uneven} (lists inside {objects.shape})")
    if bool in kinds or not all(issubclass(kind, _NUMBERS) for kind in kinds):
        return objects
    whole = all(issubclass(kind, (int, np.integer)) for kind in kinds)
    try:
        return objects.astype(np.int64 if whole else np.float64)
    except (OverflowError, TypeError, ValueError) as error:
        raise EngineError(f"{uneven} ({_short(error)})") from error


def _integers(array: np.ndarray, name: str) -> np.ndarray:
    if array.size and array.dtype.kind not in "iu":
        raise EngineError(f"{name}: ids must be integers; got {_kinds(array)}")
    return array


def _kinds(array: np.ndarray) -> str:
    if array.dtype != object:
        return _short(array.dtype)
    return _short(", ".join(sorted(kind.__name__ for kind in set(map(type, array.flat)))))


def _short(value: object) -> str:
    return said(str(value), 200)
