"""One engine's server over HTTP: asked again where that may help, never where it cannot."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import TracebackType
from typing import Any

from megatron_r3.engines.shape import EngineError

try:
    import httpx
except ImportError as missing:  # an extra: a trainer does not need it
    raise ValueError(
        "collecting rollouts takes httpx: pip install 'megatron-r3[collect]'"
    ) from missing

__all__ = ["Client", "NoAnswer"]

MAX_PAUSE = 30.0


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
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        try:
            address = httpx.URL(self.url)
        except (httpx.InvalidURL, ValueError) as error:
            raise EngineError(f"--url {url}: {error}") from error
        if address.scheme not in ("http", "https") or not address.host:
            raise EngineError(f"--url {url}: an address begins with http:// or https://")
        self.timeout, self.retries, self.pause, self.on_retry = timeout, retries, pause, on_retry
        self._http = httpx.AsyncClient(
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

    async def post(self, path: str, body: Any) -> Any:
        """The JSON that the server answers to a JSON body.

        Raises:
            NoAnswer: none after all retries, or one that another try would not change.
            EngineError: an answer that is no JSON.
        """
        return await self._ask("POST", path, body)

    async def get(self, path: str) -> Any:
        """The JSON at a path; raises as `post`."""
        return await self._ask("GET", path, None)

    async def _ask(self, method: str, path: str, body: Any) -> Any:
        for attempt in range(self.retries + 1):
            try:
                return await self._once(method, path, body)
            except _TryAgain as error:
                if attempt == self.retries:
                    tries = f" ({attempt + 1} tries)" if attempt else ""
                    raise NoAnswer(f"{self.url}{path}: {error}{tries}") from error
                self.on_retry()
                spread = self.pause * 2**attempt * random.uniform(0.5, 1.5)
                await asyncio.sleep(min(MAX_PAUSE, max(error.pause, spread)))
        raise AssertionError("unreachable")

    async def _once(self, method: str, path: str, body: Any) -> Any:
        request = self._http.request(method, self.url + path, json=body)
        try:
            answer = await asyncio.wait_for(request, self.timeout)
        except (TimeoutError, asyncio.TimeoutError, httpx.TimeoutException) as error:
            raise _TryAgain(f"no answer in {self.timeout:g} s") from error
        except httpx.RequestError as error:
            raise _TryAgain(str(error) or type(error).__name__) from error
        if answer.status_code == 429 or answer.status_code >= 500:
            raise _TryAgain(_refusal(answer), _retry_after(answer))
        if answer.status_code != 200:
            raise NoAnswer(f"{self.url}{path}: {_refusal(answer)}", answer.status_code)
        try:
            return answer.json()
        except ValueError as error:
            raise EngineError(f"{self.url}{path}: the answer is no JSON ({error})") from error


def _refusal(answer: httpx.Response) -> str:
    """Status and what the server says of it, in one line."""
    text: Any = answer.text
    try:
        body = answer.json()
        text = body.get("error") or body.get("detail") or text
        text = text.get("message", text) if isinstance(text, dict) else text
    except (ValueError, AttributeError):
        pass
    line = " ".join(str(text).split())
    return f"HTTP {answer.status_code}: {line[:300]}" if line else f"HTTP {answer.status_code}"


def _retry_after(answer: httpx.Response) -> float:
    try:
        return max(0.0, float(answer.headers.get("retry-after", 0)))
    except ValueError:  # a date
        return 0.0
