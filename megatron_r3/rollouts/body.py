"""One HTTP body within bounds: so many bytes after decompression, and no more are ever held.

A server is asked for `Accept-Encoding: identity`; one that compresses all the same is read as it
comes, a piece at a time, because 1 MB of gzip can hold 1 GB.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import AsyncIterator
from typing import Protocol

from megatron_r3.engines.shape import EngineError, ModelShape
from megatron_r3.rollouts.prompts import Prompt
from megatron_r3.untrusted import one_line

__all__ = ["CutShort", "answer_limit", "beginning_of", "body_of"]

_OF_ANY_ANSWER = 1 << 20  # names, times, counts: whatever a server sends beside its tokens
_OF_A_TOKEN = 1024  # its id twice, its text, its log-prob, and those of an alternative
_OF_AN_ID = 14  # `65535, ` of a nested list, twice
_TEMPLATE = 4096  # tokens that a chat template adds


class CutShort(Exception):
    """A compressed body ended before its end."""


class _Answer(Protocol):
    """What is used of an `httpx.Response`."""

    headers: dict[str, str]

    def aiter_raw(self) -> AsyncIterator[bytes]: ...


def answer_limit(shape: ModelShape, prompt: Prompt, max_tokens: int) -> int:
    """How many bytes the answer to a request for one sample can have, generously.

    Example: 48 layers, top-8, a prompt of 1,000 tokens and 1,024 more: 14 MB; vLLM's base64 routes
    and log-probs are 1.3 MB of them.
    """
    if prompt.tokens is not None:
        asked = len(prompt.tokens)
    else:  # a token of a text is a byte of it, or more
        asked = len(json.dumps(prompt.content)) + _TEMPLATE
    of_a_row = _OF_AN_ID * shape.num_hidden_layers * shape.topk
    return _OF_ANY_ANSWER + (asked + max_tokens) * (_OF_A_TOKEN + of_a_row)


async def body_of(answer: _Answer, most: int) -> bytearray:
    """The body, decompressed.

    Raises:
        EngineError: more than `most` bytes, an encoding that is not read, or not in that encoding.
        CutShort: it is compressed and ends too early.
    """
    length = answer.headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
        raise EngineError(f"a body of {length} bytes; {_at_most(most)}")
    unpack = _unpacker(answer.headers.get("content-encoding", ""))
    body = bytearray()
    async for piece in answer.aiter_raw():
        body += unpack.feed(piece, most + 1 - len(body))
        if len(body) > most:
            raise EngineError(f"a body without end; {_at_most(most)}")
    unpack.finish()
    return body


async def beginning_of(answer: _Answer, most: int) -> bytes:
    """The first bytes of a body that is only shown; empty where they cannot be read."""
    body = bytearray()
    try:
        unpack = _unpacker(answer.headers.get("content-encoding", ""))
        async for piece in answer.aiter_raw():
            body += unpack.feed(piece, most + 1 - len(body))
            if len(body) > most:
                break
    except EngineError:
        return b""
    return bytes(body[:most])


def _at_most(most: int) -> str:
    return f"what was asked for takes {most} at most: is this the server of --model?"


class _Plain:
    """A body as it is."""

    def feed(self, piece: bytes, room: int) -> bytes:
        return piece

    def finish(self) -> None:
        pass


class _Zlib(_Plain):
    """gzip, or deflate in either of the forms that servers send.

    Args:
        encoding: as errors call it.
        window: `zlib.decompressobj`'s wbits; None: zlib's header or none, as the first bytes say.
    """

    def __init__(self, encoding: str, window: int | None) -> None:
        self.encoding, self.window = encoding, window
        self._inflate: zlib._Decompress | None = None

    def feed(self, piece: bytes, room: int) -> bytes:
        """At most `room` bytes, which is at least 1; zlib takes 0 for no limit."""
        if not piece:
            return b""
        if self._inflate is None:
            # a raw stream begins with 8 in these bits for a block that no compressor writes: one
            # that is stored, not the last, and padded with a 1
            has_header = piece[0] & 15 == 8
            window = self.window or (zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
            self._inflate = zlib.decompressobj(window)
        try:
            data = self._inflate.decompress(piece, room)
        except zlib.error as error:
            raise EngineError(f"the body is not {self.encoding} ({error})") from error
        if self._inflate.unused_data:
            raise EngineError(f"the body goes on after the end of its {self.encoding}")
        return data

    def finish(self) -> None:
        if self._inflate is None or not self._inflate.eof:
            raise CutShort(f"the body ended inside its {self.encoding}")


def _unpacker(encoding: str) -> _Plain:
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return _Plain()
    if name in ("gzip", "x-gzip"):
        return _Zlib(name, 16 + zlib.MAX_WBITS)
    if name == "deflate":
        return _Zlib(name, None)
    raise EngineError(
        f"the body comes in the encoding {one_line(encoding, 40)!r}; identity was asked for, gzip "
        "and deflate are read too"
    )
