"""Arrays out of what engines send: base64 `.npy`, nested lists, or arrays."""

from __future__ import annotations

import binascii
import io
from typing import Any

import numpy as np
import pybase64

from megatron_r3.engines.shape import EngineError

__all__ = ["integer_array", "token_array"]


def integer_array(value: Any, what: str) -> np.ndarray:
    """Three axes of integers from base64 of a `.npy`, nested lists, or an array.

    Raises:
        EngineError: naming `what`; numpy's own errors never escape and nothing is unpickled.
    """
    array = _npy(value, what) if isinstance(value, str) else _plain(value, what)
    if array.ndim != 3:
        raise EngineError(f"{what}: routes are [tokens, layers, topk]; got shape {array.shape}")
    return array


def token_array(value: Any, what: str) -> np.ndarray:
    """Token ids as int32."""
    array = _plain(value, what)
    if array.ndim != 1 or not array.size or array.min() < 0 or array.max() > 2**31 - 1:
        raise EngineError(f"{what}: token ids are a list of at least one, from 0 on")
    return array.astype(np.int32)


def _npy(text: str, what: str) -> np.ndarray:
    try:
        raw = pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise EngineError(f"{what}: not whole base64 ({error})") from error
    stream = io.BytesIO(raw)
    try:
        array = np.lib.format.read_array(stream, allow_pickle=False)
    except Exception as error:  # a broken header raises whatever ast and tokenize raise
        raise EngineError(f"{what}: not a whole .npy of numbers ({error})") from error
    if stream.read(1):
        raise EngineError(f"{what}: bytes are left after the .npy array")
    return _integers(array, what)


def _plain(value: Any, what: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise EngineError(f"{what}: not an even table of numbers ({error})") from error
    return _integers(array, what)


def _integers(array: np.ndarray, what: str) -> np.ndarray:
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise EngineError(f"{what}: ids are integers; got {array.dtype}")
    return array
