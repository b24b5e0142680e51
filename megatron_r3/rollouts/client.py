"""One engine's server over HTTP: asked again where that may help, never where it cannot."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from types import TracebackType
from typing import Any

from megatron_r3.engines.shape import EngineError
from megatron_r3.rollouts.body import CutShort, beginning_of, body_of
from megatron_r3.untrusted import one_line, read_json

try:
    import httpx
except ImportError as missing:  # an extra: a trainer does not need it
    raise ValueError(
        "collecting rollouts takes httpx: pip install 'megatron-r3[collect]'"
    ) from missing

__all__ = ["Client", "NoAnswer"]

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
