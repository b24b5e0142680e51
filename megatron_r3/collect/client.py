"""An HTTP client that repeats requests after connection errors, timeouts, 429 and 5xx."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
from collections.abc import Callable
from typing import Any

from megatron_r3.collect.engine import NoAnswer
from megatron_r3.data.engines.shape import EngineError
from megatron_r3.data.untrusted import read_json
from megatron_r3.replay.words import one_line

try:
    import aiohttp
    from yarl import URL
except ImportError as missing:  # an optional dependency: a trainer does not need it
    raise ValueError(
        "collecting rollouts needs aiohttp: pip install 'megatron-r3[collect]'"
    ) from missing

LONGEST_PAUSE_S = 30.0
MOST_BYTES_OF_A_PAGE = 1 << 22  # a page about the server itself; SGLang's has some 20 kB
MOST_BYTES_OF_A_REFUSAL = 1 << 16


class _TryAgain(Exception):
    """This request failed, and a repetition of it may succeed.

    Attributes:
        pause: the seconds of the server's Retry-After header; 0 if it sent none.
    """

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


class Client:
    """Sends requests to one server.

    Args:
        url: the server's address; a `/v1` at its end is left out.
        concurrency: the largest number of requests at a time.
        timeout: seconds for one attempt, with connecting and reading.
        retries: how often a request is repeated at most, after a connection error, a timeout, 429
            or 5xx.
        pause: seconds before the first repetition. The pause doubles with each repetition, and is
            multiplied by a random factor from 0.5 to 1.5, so that requests that failed together are
            not repeated together. A longer Retry-After of the server counts instead. No pause is
            longer than 30 s.

    Attributes:
        url: the address without a user's name and password.
        on_retry: called before each repetition.

    Raises:
        EngineError: `url` is no http or https address, or has a query or a fragment.
    """

    def __init__(
        self, url: str, concurrency: int, timeout: float, retries: int, pause: float
    ) -> None:
        self.url, user = _address(url)
        self._headers = {"Accept-Encoding": "identity", **user}
        self.timeout, self.retries, self.pause = timeout, retries, pause
        self.on_retry: Callable[[], None] = lambda: None
        self._concurrency = concurrency
        self._http: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections."""
        if self._http is not None:
            await self._http.close()

    async def post(self, path: str, body: Any, most_bytes: int) -> Any:
        """Send a JSON body, and return the JSON of the answer.

        Args:
            path: the request's path, which begins with a slash.
            body: what is sent as JSON.
            most_bytes: an answer with more bytes is refused.

        Raises:
            NoAnswer: the request cannot be sent, the server refused it, or it failed each time.
            EngineError: the answer is too long, compressed, or not JSON.
        """
        return await self._ask("POST", path, body, most_bytes)

    async def get(self, path: str) -> Any:
        """The JSON at a path; raises what `post` raises."""
        return await self._ask("GET", path, None, MOST_BYTES_OF_A_PAGE)

    async def _ask(self, method: str, path: str, body: Any, most_bytes: int) -> Any:
        for attempt in range(self.retries + 1):
            try:
                data = await self._send(method, path, body, most_bytes)
            except _TryAgain as error:
                if attempt == self.retries:
                    tries = f" ({attempt + 1} tries)" if attempt else ""
                    raise NoAnswer(f"{self.url}{path}: {error}{tries}") from error
                self.on_retry()
                pause = self.pause * 2**attempt * random.uniform(0.5, 1.5)
                await asyncio.sleep(min(LONGEST_PAUSE_S, max(error.pause, pause)))
                continue
            try:
                return read_json(data, f"{self.url}{path}", most_bytes)
            except ValueError as error:
                raise EngineError(str(error)) from error
        raise AssertionError("unreachable")

    async def _send(self, method: str, path: str, body: Any, most_bytes: int) -> bytes:
        """Send a request once; raises `_TryAgain` if a repetition may succeed."""
        try:
            return await self._exchange(method, path, body, most_bytes)
        except asyncio.TimeoutError as error:
            raise _TryAgain(f"no answer in {self.timeout:g} s") from error
        except (_TryAgain, NoAnswer):
            raise
        except EngineError as error:
            raise EngineError(f"{self.url}{path}: {error}") from error
        except Exception as error:
            reason = one_line(str(error), 300) or type(error).__name__
            if isinstance(error, aiohttp.ClientError) and not isinstance(error, aiohttp.InvalidURL):
                raise _TryAgain(reason) from error
            # A request that cannot be sent: ValueError for a body with NaN, for example.
            raise NoAnswer(f"{self.url}{path}: {type(error).__name__}: {reason}") from error

    async def _exchange(self, method: str, path: str, body: Any, most_bytes: int) -> bytes:
        if self._http is None:  # made here, because a session belongs to the event loop that runs
            self._http = aiohttp.ClientSession(
                headers=self._headers,
                # Ignore the environment's proxy: an engine runs on this machine or near it.
                trust_env=False,
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=self.timeout),
                connector=aiohttp.TCPConnector(limit=self._concurrency),
            )
        data, headers = None, {}
        if method == "POST":
            data = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
            headers = {"Content-Type": "application/json"}
        async with self._http.request(
            method, self.url + path, data=data, headers=headers, allow_redirects=False
        ) as answer:
            if answer.status == 200:
                return await _body(answer, most_bytes)
            message = _refusal(answer.status, await _beginning(answer, MOST_BYTES_OF_A_REFUSAL))
            if answer.status == 429 or answer.status >= 500:
                raise _TryAgain(message, _retry_after(answer))
            raise NoAnswer(f"{self.url}{path}: {message}", answer.status)


def _address(url: str) -> tuple[str, dict[str, str]]:
    """The address without a user, and the header with the user's name and password, if any.

    No message shows a password: a message about a wrong address leaves out all between the
    `http://` and the last `@`. Example: `http://me:pass#word@host` is shown as `http://...@host`.
    yarl reads it as the host `me` with the port `pass`, and would quote half of the password.
    """
    shown = one_line(re.sub(r"^([a-zA-Z]+://)?.*@", r"\1...@", url, flags=re.DOTALL), 300)
    try:
        address = URL(url.rstrip("/").removesuffix("/v1").rstrip("/"))
    except ValueError as error:
        reason = "" if "@" in url else f" ({one_line(str(error), 300)})"
        raise EngineError(f"--url {shown}: this is no address{reason}") from error
    if address.scheme not in ("http", "https") or not address.host:
        raise EngineError(f"--url {shown}: the address must begin with http:// or https://")
    if address.query_string or address.fragment:
        raise EngineError(
            f"--url {shown}: leave ? and # out of the address, because paths are added at its end"
        )
    user = {}
    if "@" in address.raw_authority:
        secret = f"{address.user or ''}:{address.password or ''}".encode()
        user = {"Authorization": f"Basic {base64.b64encode(secret).decode()}"}
    return str(address.with_user(None)).rstrip("/"), user


async def _body(answer: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """The whole body. A compressed body is refused, because 1 MB of gzip can hold 1 GB."""
    encoding = answer.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise EngineError(
            f"the body has the encoding {one_line(encoding, 40)!r}, though the request asked for "
            "none: is there a proxy in between? Give the server's own address"
        )
    most = f"an answer to this request has at most {most_bytes}: is this the server of --model?"
    length = answer.headers.get("content-length", "")
    if length.isdigit() and int(length) > most_bytes:
        raise EngineError(f"the body has {length} bytes; {most}")
    body = await _beginning(answer, most_bytes + 1)  # one byte more shows a body that is too long
    if len(body) > most_bytes:
        raise EngineError(f"the body has more than {most_bytes} bytes; {most}")
    return body


async def _beginning(answer: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """The first `most_bytes` bytes of a body, or all if it has fewer; nothing is decompressed."""
    pieces: list[bytes] = []
    async for piece in answer.content.iter_any():
        pieces.append(piece[:most_bytes])
        most_bytes -= len(pieces[-1])
        if not most_bytes:
            break
    return b"".join(pieces)


def _refusal(status: int, body: bytes) -> str:
    """The status and the server's reason, in one line.

    Servers give the reason as `{"error": {"message": ...}}`, `{"error": ...}`, `{"detail": ...}`,
    or as plain text or HTML.
    """
    reason: Any = body.decode("utf-8", "replace")
    try:
        parsed = read_json(body, "the refusal")
        reason = parsed.get("error") or parsed.get("detail") or reason
        reason = reason.get("message", reason) if isinstance(reason, dict) else reason
    except (ValueError, AttributeError):
        pass
    line = one_line(str(reason), 300)
    return f"HTTP {status}: {line}" if line else f"HTTP {status}"


def _retry_after(answer: aiohttp.ClientResponse) -> float:
    """The seconds of the Retry-After header; 0 if there is none, or if it holds a date."""
    try:
        return max(0.0, float(answer.headers.get("retry-after", 0)))
    except ValueError:
        return 0.0
