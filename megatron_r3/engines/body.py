"""What the requests and responses of all engines have in common: prompts, choices, options."""

from __future__ import annotations

import binascii
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pybase64

from megatron_r3.engines.shape import EngineError
from megatron_r3.untrusted import quoted, said
from megatron_r3.values import MOST_TOKEN_ID

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


# Arrays out of what engines send: base64 of a `.npy` or of bare bytes, nested lists, or arrays.
#
# Nothing is unpickled, and nothing is allocated that the data does not hold: the shape that a
# header
# claims is compared with the bytes that are there before an array is made.
#
# Shape suffixes: G numbers of a list.

_NUMBERS = (int, float, np.integer, np.floating)


def integer_array(value: Any, what: str) -> np.ndarray:
    """Three axes of integers from base64 of a `.npy`, nested lists, or an array.

    Raises:
        EngineError: naming `what`; numpy's own errors never escape and nothing is unpickled.
    """
    if isinstance(value, str):
        array = npy_array(_bytes(value, what), what)
    else:
        array = _integers(_plain(value, what), what)
    if array.ndim != 3:
        raise EngineError(f"{what}: routes are [tokens, layers, topk]; got shape {array.shape}")
    return array


def bare_array(text: Any, dtype: str, what: str) -> np.ndarray:
    """One axis of numbers from base64 of their bytes, which say neither shape nor dtype."""
    raw = _bytes(text, what)
    if len(raw) % np.dtype(dtype).itemsize:
        raise EngineError(f"{what}: {len(raw)} bytes are no whole number of {dtype}")
    return np.frombuffer(raw, dtype)


def token_array(value: Any, what: str) -> np.ndarray:
    """Token ids as int32."""
    array = _integers(_plain(value, what), what)
    if array.ndim != 1 or not array.size or array.min() < 0 or array.max() > 2**31 - 1:
        raise EngineError(f"{what}: token ids are a list of at least one, from 0 on")
    return array.astype(np.int32)


def number_array(value: Any, what: str) -> np.ndarray:
    """Numbers of a list as float32; what is too large for it is infinite."""
    array_G = _plain(value, what)
    if array_G.ndim != 1 or array_G.dtype.kind not in "iuf":
        raise EngineError(f"{what}: a list of numbers; got {_kinds(array_G)}")
    with np.errstate(over="ignore"):
        return array_G.astype(np.float32)


def _bytes(text: Any, what: str) -> bytes:
    if not isinstance(text, str):
        raise EngineError(f"{what}: base64 text; got {type(text).__name__}")
    try:
        return pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise EngineError(f"{what}: not whole base64 ({_short(error)})") from error


# the header as numpy writes it; numpy's own reader parses it as Python, which takes as long as a
# fifth of the routes that follow
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{ ?'descr': ?'(?P<descr>[|<>=]\w{1,15})', ?"
    rb"'fortran_order': ?(?P<fortran>True|False), ?"
    rb"'shape': ?\((?P<shape>[\d, ]{0,100})\),? ?\} *\n",
    re.DOTALL,
)


def npy_array(raw: bytes | bytearray, what: str, kinds: str = "iu") -> np.ndarray:
    """The array of a `.npy` file's bytes, which it shares.

    Args:
        raw: the whole file.
        what: what errors call it.
        kinds: of numpy's dtypes ("iu": integers), those that may be in it.

    Raises:
        EngineError: naming `what`: a header that numpy does not write, or not the size it says.
    """
    header = _NPY.match(raw)
    if header is None:
        raise EngineError(
            f"{what}: not a whole .npy of numbers (it begins with {_short(bytes(raw[:120]))})"
        )
    try:
        dtype = np.dtype(header["descr"].decode())
        shape = tuple(int(axis) for axis in header["shape"].split(b",") if axis.strip())
    except (TypeError, ValueError) as error:
        raise EngineError(f"{what}: not a whole .npy of numbers ({_short(error)})") from error
    if dtype.kind not in kinds:
        expected_kind = "ids are integers" if kinds == "iu" else f"dtypes of kind {kinds!r}"
        raise EngineError(f"{what}: {expected_kind}; got {_short(dtype)}")
    expected, got = math.prod(shape) * dtype.itemsize, len(raw) - header.end()
    if expected != got:
        raise EngineError(
            f"{what}: not a whole .npy of numbers ({got} bytes for {shape} of {dtype})"
        )
    try:
        flat = np.frombuffer(raw, dtype, offset=header.end()) if got else np.empty(0, dtype)
        return flat.reshape(shape, order="F" if header["fortran"] == b"True" else "C")
    except ValueError as error:  # an empty shape may have axes that no array has
        raise EngineError(f"{what}: not a whole .npy of numbers ({error})") from error


def _plain(value: Any, what: str) -> np.ndarray:
    """An array; of lists that hold anything but numbers one of objects."""
    if isinstance(value, (list, tuple)):
        return _from_lists(value, what)
    if not hasattr(value, "__array__"):
        raise EngineError(f"{what}: a list or an array; got {type(value).__name__}")
    try:
        return np.asarray(value)
    except Exception as error:  # another library's array: its errors are its own
        raise EngineError(f"{what}: not an array of numbers ({_short(error)})") from error


def _from_lists(value: list[Any] | tuple[Any, ...], what: str) -> np.ndarray:
    try:
        # as objects: numpy would pad every element to the longest text among them
        objects = np.array(value, dtype=object)
    except (ValueError, OverflowError, RecursionError) as error:
        raise EngineError(f"{what}: not an even table of numbers ({_short(error)})") from error
    if objects.ndim > 8:  # numpy itself walks no more than 32 axes
        raise EngineError(f"{what}: not an even table of numbers ({objects.ndim} axes)")
    kinds = set(map(type, objects.flat))
    if kinds & {list, tuple}:
        raise EngineError(f"{what}: not an even table of numbers (lists inside {objects.shape})")
    if bool in kinds or not all(issubclass(kind, _NUMBERS) for kind in kinds):
        return objects
    whole = all(issubclass(kind, (int, np.integer)) for kind in kinds)
    try:
        return objects.astype(np.int64 if whole else np.float64)
    except (OverflowError, TypeError, ValueError) as error:
        raise EngineError(f"{what}: not an even table of numbers ({_short(error)})") from error


def _integers(array: np.ndarray, what: str) -> np.ndarray:
    if array.size and array.dtype.kind not in "iu":
        raise EngineError(f"{what}: ids are integers; got {_kinds(array)}")
    return array


def _kinds(array: np.ndarray) -> str:
    if array.dtype != object:
        return _short(array.dtype)
    return _short(", ".join(sorted(kind.__name__ for kind in set(map(type, array.flat)))))


def _short(value: object) -> str:
    return said(str(value), 200)
