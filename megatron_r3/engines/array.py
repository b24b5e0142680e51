"""Arrays out of what engines send: base64 of a `.npy` or of bare bytes, nested lists, or arrays.

Nothing is unpickled, and nothing is allocated that the data does not hold: the shape that a header
claims is compared with the bytes that are there before an array is made.

Shape suffixes: G numbers of a list.
"""

from __future__ import annotations

import binascii
import math
import re
from typing import Any

import numpy as np
import pybase64

from megatron_r3.engines.shape import EngineError
from megatron_r3.untrusted import said

__all__ = ["bare_array", "integer_array", "npy_array", "number_array", "token_array"]

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
