"""One engine's server over HTTP: asked again where that may help, never where it cannot."""

from __future__ import annotations

import asyncio
import json
import random
import re
import zlib
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Protocol

from megatron_r3.engines.shape import EngineError, ModelShape
from megatron_r3.rollouts.prompts import Prompt
from megatron_r3.untrusted import one_line, read_json

try:
    import httpx
except ImportError as missing:  # an extra: a trainer does not need it
    raise ValueError(
        "collecting rollouts takes httpx: pip install 'megatron-r3[collect]'"
    ) from missing

MAX_PAUSE = 30.0
MOST_OF_A_PAGE = 1 << 22  # bytes of what a server says of itself; SGLang's is some 20 KB
MOST_OF_A_REFUSAL = 1 << 16


class NoAnswer(EngineError):
    """The server did not answer, or refused; the message says what it said.

    Attributes:
        status: the HTTP status of a refusal, else None.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class _TryAgain(Exception):
    """This try failed, another may not.

    Attributes:
        pause: how long the server wants to be left alone, in seconds.
    """

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


class Client:
    """Asks, and asks again after connection errors, 429 and 5xx, with growing pauses.

    Args:
        url: of the server; a `/v1` at its end is left out.
        concurrency: most requests at a time.
        timeout: seconds for one request, connecting to last byte.
        retries: how often one request is repeated.
        pause: seconds before the first repetition; it doubles with each, and is spread at random.
        on_retry: called before each repetition.

    Attributes:
        url: as messages show it: without a user's name and password.

    Raises:
        EngineError: no http address.
    """

    def __init__(
        self,
        url: str,
        concurrency: int,
        timeout: float,
        retries: int,
        pause: float,
        on_retry: Callable[[], None] = lambda: None,
    ) -> None:
        self.url, user = _address(url)
        self.timeout, self.retries, self.pause, self.on_retry = timeout, retries, pause, on_retry
        self._http = httpx.AsyncClient(
            auth=user,
            headers={"Accept-Encoding": "identity"},
            timeout=timeout,
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            trust_env=False,  # engines are near: no proxy
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def post(self, path: str, body: Any, most: int) -> Any:
        """The JSON that the server answers to a JSON body.

        Args:
            path, body: of the request.
            most: bytes of an answer.

        Raises:
            NoAnswer: none after all retries, or one that another try would not change.
            EngineError: an answer that is too long or no JSON.
        """
        return await self._ask("POST", path, body, most)

    async def get(self, path: str) -> Any:
        """The JSON at a path; raises as `post`."""
        return await self._ask("GET", path, None, MOST_OF_A_PAGE)

    async def _ask(self, method: str, path: str, body: Any, most: int) -> Any:
        for attempt in range(self.retries + 1):
            try:
                data = await self._once(method, path, body, most)
            except _TryAgain as error:
                if attempt == self.retries:
                    tries = f" ({attempt + 1} tries)" if attempt else ""
                    raise NoAnswer(f"{self.url}{path}: {error}{tries}") from error
                self.on_retry()
                spread = self.pause * 2**attempt * random.uniform(0.5, 1.5)
                await asyncio.sleep(min(MAX_PAUSE, max(error.pause, spread)))
                continue
            try:
                return read_json(bytes(data), f"{self.url}{path}", most)
            except ValueError as error:
                raise EngineError(str(error)) from error
        raise AssertionError("unreachable")

    async def _once(self, method: str, path: str, body: Any, most: int) -> bytearray:
        try:
            # Python 3.11's wait_for may swallow a cancel: `end_tasks` cancels until a task has
            # ended
            return await asyncio.wait_for(self._exchange(method, path, body, most), self.timeout)
        except (TimeoutError, asyncio.TimeoutError, httpx.TimeoutException) as error:
            raise _TryAgain(f"no answer in {self.timeout:g} s") from error
        except (httpx.RequestError, CutShort) as error:
            raise _TryAgain(one_line(str(error), 300) or type(error).__name__) from error
        except (_TryAgain, NoAnswer):
            raise
        except EngineError as error:
            raise EngineError(f"{self.url}{path}: {error}") from error
        except Exception as error:  # a name or a body that the libraries below cannot send
            text = one_line(f"{type(error).__name__}: {error}", 300)
            raise NoAnswer(f"{self.url}{path}: {text}") from error

    async def _exchange(self, method: str, path: str, body: Any, most: int) -> bytearray:
        async with self._http.stream(method, self.url + path, json=body) as answer:
            status = answer.status_code
            if status == 200:
                return await body_of(answer, most)
            said = _refusal(status, await beginning_of(answer, MOST_OF_A_REFUSAL))
            if status == 429 or status >= 500:
                raise _TryAgain(said, _retry_after(answer))
            raise NoAnswer(f"{self.url}{path}: {said}", status)


def _address(url: str) -> tuple[str, tuple[str, str] | None]:
    """The address without a user, and the user's name and password.

    A password is in none of the messages: of an address that cannot be read, what stands before its
    last `@` is left out. Example: `http://me:pass#word@host` reads as the host `me` and a port
    `pass`; it is shown as `http://...@host`.
    """
    shown = one_line(re.sub(r"^([a-zA-Z]+://)?.*@", r"\1...@", url, flags=re.DOTALL), 300)
    try:
        address = httpx.URL(url.rstrip("/").removesuffix("/v1").rstrip("/"))
    except (httpx.InvalidURL, ValueError) as error:
        why = "" if "@" in url else f" ({one_line(str(error), 300)})"
        raise EngineError(f"--url {shown}: not an address{why}") from error
    if address.scheme not in ("http", "https") or not address.host:
        raise EngineError(f"--url {shown}: an address begins with http:// or https://")
    if address.query or address.fragment:
        raise EngineError(f"--url {shown}: an address without ? and #; paths are put after it")
    if address.port is not None and not 1 <= address.port <= 65535:
        raise EngineError(f"--url {shown}: a port is 1 to 65535")
    user = (address.username, address.password) if address.userinfo else None
    return str(address.copy_with(username=None, password=None)).rstrip("/"), user


def _refusal(status: int, body: bytes) -> str:
    """Status and what the server says of it, in one line."""
    text: Any = body.decode("utf-8", "replace")
    try:
        parsed = read_json(body, "the refusal")
        text = parsed.get("error") or parsed.get("detail") or text
        text = text.get("message", text) if isinstance(text, dict) else text
    except (ValueError, AttributeError):
        pass
    line = one_line(str(text), 300)
    return f"HTTP {status}: {line}" if line else f"HTTP {status}"


def _retry_after(answer: httpx.Response) -> float:
    try:
        return max(0.0, float(answer.headers.get("retry-after", 0)))
    except ValueError:  # a date
        return 0.0


# One HTTP body within bounds: so many bytes after decompression, and no more are ever held.
#
# A server is asked for `Accept-Encoding: identity`; one that compresses all the same is read as it
# comes, a piece at a time, because 1 MB of gzip can hold 1 GB.

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
