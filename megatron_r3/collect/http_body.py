"""Reads one HTTP body within bounds: it never holds more bytes than asked for, decompressed.

The client asks for `Accept-Encoding: identity`. Some servers and proxies compress all the same, so
gzip and deflate are read too, a piece at a time: 1 MB of gzip can hold 1 GB.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import AsyncIterator
from typing import Protocol

from megatron_r3.collect.prompt_plan import Sampling
from megatron_r3.collect.prompts import Prompt
from megatron_r3.data.engines.shape import EngineError, ModelShape
from megatron_r3.replay.words import one_line

# Bytes of a generous answer. Real ones are a tenth of it.
_OF_ANY_ANSWER = 1 << 20  # names, times, counts: whatever a server sends beside its tokens
_OF_A_TOKEN = 1024  # its id twice, its text, its log-prob, and the same of one alternative
_OF_AN_ID = 14  # an expert id as `65535, ` in a nested list, twice
_OF_A_KEPT_ID = 16  # `2147483647, ` and some blanks
_MOST_KEPT = 65_536  # of a token; SGLang sends 4096 if it is not told otherwise
_TEMPLATE_TOKENS = 4096  # tokens that a chat template adds to the messages


class CutShort(Exception):
    """A compressed body ended before its end mark."""


class _Answer(Protocol):
    """The part of `httpx.Response` that is used here."""

    headers: dict[str, str]

    def aiter_raw(self) -> AsyncIterator[bytes]: ...


def answer_limit(shape: ModelShape, prompt: Prompt, sampling: Sampling) -> int:
    """The largest number of bytes that the answer to a request for one sample may have.

    Example: 48 layers, top-8, a prompt of 1,000 tokens and 1,024 sampled tokens: 14 MB. vLLM's
    routes in base64 and its log-probs take 1.3 MB of them.
    """
    if prompt.tokens is not None:
        prompt_tokens = len(prompt.tokens)
    else:  # a token of a text has at least one byte of the text
        prompt_tokens = len(json.dumps(prompt.content)) + _TEMPLATE_TOKENS
    of_a_row = _OF_AN_ID * shape.num_hidden_layers * shape.topk
    limit = _OF_ANY_ANSWER + (prompt_tokens + sampling.max_tokens) * (_OF_A_TOKEN + of_a_row)
    if sampling.wants_kept:  # tokens of one probability may be kept beyond top-k
        kept = min(2 * sampling.top_k, shape.vocab_size or _MOST_KEPT)
        limit += sampling.max_tokens * _OF_A_KEPT_ID * kept
    return limit


async def body_of(answer: _Answer, most_bytes: int) -> bytearray:
    """The whole body, decompressed.

    Raises:
        EngineError: the body has more than `most_bytes`, comes in an encoding that is not read, or
            is not in the encoding that the header names.
        CutShort: the body is compressed and ends too early.
    """
    length = answer.headers.get("content-length", "")
    if length.isdigit() and int(length) > most_bytes:
        raise EngineError(f"the body has {length} bytes; {_at_most(most_bytes)}")
    unpacker = _unpacker(answer.headers.get("content-encoding", ""))
    body = bytearray()
    async for piece in answer.aiter_raw():
        # One byte more than allowed is room enough to see that the body is too long.
        body += unpacker.feed(piece, most_bytes + 1 - len(body))
        if len(body) > most_bytes:
            raise EngineError(f"the body does not end; {_at_most(most_bytes)}")
    unpacker.finish()
    return body


async def beginning_of(answer: _Answer, most_bytes: int) -> bytes:
    """The first bytes of a body that is only shown to a person; empty if they cannot be read."""
    body = bytearray()
    try:
        unpacker = _unpacker(answer.headers.get("content-encoding", ""))
        async for piece in answer.aiter_raw():
            body += unpacker.feed(piece, most_bytes + 1 - len(body))
            if len(body) > most_bytes:
                break
    except EngineError:
        return b""
    return bytes(body[:most_bytes])


def _at_most(most_bytes: int) -> str:
    return f"what was asked for takes {most_bytes} at most: is this the server of --model?"


class _Plain:
    """A body without compression."""

    def feed(self, piece: bytes, room: int) -> bytes:
        return piece

    def finish(self) -> None:
        pass


class _Zlib(_Plain):
    """A body in gzip, or in deflate in either of the two forms that servers send.

    Args:
        encoding: how errors call it.
        window: the `wbits` of `zlib.decompressobj`. None means deflate, whose first byte tells its
            form.
    """

    def __init__(self, encoding: str, window: int | None) -> None:
        self.encoding, self.window = encoding, window
        self._inflate: zlib._Decompress | None = None

    def feed(self, piece: bytes, room: int) -> bytes:
        """At most `room` bytes. `room` is at least 1, because zlib takes 0 for "no limit"."""
        if not piece:
            return b""
        if self._inflate is None:
            # RFC 9110 says that "deflate" has zlib's header; some servers send raw deflate. The low
            # four bits of zlib's first byte are 8 (example: 0x78). In raw deflate they would mean a
            # stored block that is not the last one, padded with a 1, which no compressor writes.
            has_header = piece[0] & 15 == 8
            window = self.window or (zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
            self._inflate = zlib.decompressobj(window)
        try:
            # What does not fit into `room` stays inside as `unconsumed_tail` and is never looked
            # at: the caller gives up as soon as the body fills its room.
            data = self._inflate.decompress(piece, room)
        except zlib.error as error:
            raise EngineError(f"the body is not {self.encoding} ({error})") from error
        if self._inflate.unused_data:
            raise EngineError(f"the body goes on after the end of its {self.encoding} data")
        return data

    def finish(self) -> None:
        if self._inflate is None or not self._inflate.eof:
            raise CutShort(f"the body ended inside its {self.encoding} data")


def _unpacker(encoding: str) -> _Plain:
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return _Plain()
    if name in ("gzip", "x-gzip"):
        return _Zlib(name, 16 + zlib.MAX_WBITS)  # 16: zlib expects gzip's header
    if name == "deflate":
        return _Zlib(name, None)
    raise EngineError(
        f"the body has the encoding {one_line(encoding, 40)!r}; expected identity, gzip or deflate"
    )
