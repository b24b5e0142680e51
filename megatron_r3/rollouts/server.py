"""The server that samples: where it is, how patient to be with it, and what it says of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron_r3.engines.shape import EngineError
from megatron_r3.rollouts.client import Client, NoAnswer
from megatron_r3.rollouts.shelf import Shelf
from megatron_r3.values import wrong_text


class ServerChanged(ValueError):
    """The server is not what it was when the collection began."""


@dataclass(frozen=True)
class Server:
    """An engine's address, and how it is asked (`Client`)."""

    engine: str
    url: str
    concurrency: int = 32
    timeout: float = 600.0
    retries: int = 6
    pause: float = 0.5


@dataclass(frozen=True)
class Identity:
    """What a server says of itself; empty where it does not.

    Attributes:
        version: of the engine.
        model: the name under which it has its model.
        policy: the version of the weights, as whoever loads them names it.
    """

    version: str = ""
    model: str = ""
    policy: str = ""


def _vllm_version(page: Any) -> Mapping[str, Any]:
    return {"version": page["version"]}


def _vllm_model(page: Any) -> Mapping[str, Any]:
    return {"model": page["data"][0]["id"]}


def _vllm_policy(page: Any) -> Mapping[str, Any]:
    return {"policy": page["weight_version"]}


def _sglang(page: Any) -> Mapping[str, Any]:
    return {
        "version": page["version"],
        "model": page.get("served_model_name") or page.get("model_path"),
        "policy": page.get("weight_version"),
    }


_Read = Callable[[Any], Mapping[str, Any]]
# for each thing that an engine tells the pages that may have it, in turn; vLLM has its third one
# where it takes new weights (VLLM_SERVER_DEV_MODE)
_PAGES: dict[str, tuple[tuple[tuple[str, ...], _Read], ...]] = {
    "vllm": (
        (("/version",), _vllm_version),
        (("/v1/models",), _vllm_model),
        (("/weight_info",), _vllm_policy),
    ),
    "sglang": ((("/server_info", "/get_server_info"), _sglang),),
}


class Watch:
    """Asks a server what it is: at the start, and again after its responses.

    Attributes:
        start: what it was at the start.
    """

    def __init__(self, client: Client, engine: str) -> None:
        self.start = Identity()
        self._client, self._engine = client, engine
        self._pages: list[tuple[str, _Read]] = []
        self._asking = asyncio.Lock()
        self._asked = 0  # how many responses wait, or waited, to be confirmed
        self._answered = 0  # how many of them a check that has ended began after
        self._failed: EngineError | None = None  # why that check has no answer

    async def begin(self) -> Identity:
        """Ask every page that the engine may have; later the ones that it has.

        Raises:
            EngineError: no answer, or one that no engine gives.
        """
        found: dict[str, str] = {}
        for paths, read in _PAGES[self._engine]:
            for path in paths:
                try:
                    page = await self._client.get(path)
                except NoAnswer as error:
                    if error.status != 404:
                        raise
                    continue
                found |= self._read(page, path, read)
                self._pages.append((path, read))
                break
        self.start = Identity(**found)
        return self.start

    async def confirm(self) -> None:
        """Return if the server is what it was at the start, asked after this call began.

        One check serves all responses that came before it began. Example: while one is under way
        for response 1, responses 2 to 30 come; the first of them to get the lock asks again, and
        the other 28 find that it asked for them too.

        Raises:
            ServerChanged: it is another one.
            NoAnswer: it does not say.
        """
        self._asked += 1
        mine = self._asked
        async with self._asking:
            if self._answered < mine:
                serves, self._failed = self._asked, None
                try:
                    await self._compare()
                except EngineError as error:
                    self._failed = error
                self._answered = serves
            if self._failed is not None:
                raise NoAnswer(f"is it still the same server? {self._failed}")

    async def _compare(self) -> None:
        found: dict[str, str] = {}
        for path, read in self._pages:
            found |= self._read(await self._client.get(path), path, read)
        now = Identity(**found)
        for one in fields(Identity):
            was, is_now = getattr(self.start, one.name), getattr(now, one.name)
            if was != is_now:
                raise ServerChanged(
                    f"{self._client.url}: the server changed: its {one.name} was {was!r} at the "
                    f"start and is {is_now!r}: the responses in between are not stored"
                )

    def _read(self, page: Any, path: str, read: _Read) -> dict[str, str]:
        """The texts of a page by the name of `Identity`'s field.

        Raises:
            EngineError: another page, or a text that is none.
        """
        where = f"{self._client.url}{path}"
        try:
            found = read(page)
        except (AttributeError, LookupError, TypeError) as error:
            raise EngineError(f"{where}: not what {self._engine} answers: no {error}") from error
        texts = {
            name: str(value) if type(value) is int else value
            for name, value in found.items()
            if value is not None
        }
        for name, value in texts.items():
            wrong = wrong_text(value)
            if wrong is not None:
                raise EngineError(f"{where}: the server's {name} is {wrong}")
        return texts


# The version of its weights that an engine itself reports: one policy version of a store has one.
#
# SGLang says it in each response, and on its page; vLLM on a page where it takes new weights, and
# from 0.32 on in responses.


class EnginePolicy:
    """What the engine reported first; every later response must agree.

    Args:
        shelf: whose info says it.
        stored: what the store's rollouts of this policy version say; None: it has none.
    """

    def __init__(self, shelf: Shelf, stored: str | None) -> None:
        at_the_start = shelf.info.engine_policy
        self._shelf = shelf
        self._known: str | None = (at_the_start or None) if stored is None else stored
        # a store that says it, and a server that did not so far
        self._asked_for = bool(stored) and not at_the_start
        if stored is not None:
            shelf.info = replace(shelf.info, engine_policy=stored)

    def check(self, reported: Sequence[str], where: str) -> None:
        """Refuse a response that other weights sampled, or that two of them did.

        Args:
            reported: what the response says; nothing where the engine does not.
            where: what errors call the response.

        Raises:
            ServerChanged: naming both versions.
        """
        if not reported and self._asked_for:
            raise ServerChanged(
                f"{where}: the engine does not say which weights sampled; the rollouts in "
                f"{self._shelf.out} are of its weights {self._known!r}: take another "
                "--policy-version or --out"
            )
        for version in reported:
            if self._known is None and self._shelf.stored:
                self._known = ""  # that is what its shards say
            if self._known is None:
                self._known = version
                self._shelf.info = replace(self._shelf.info, engine_policy=version)
            elif version != self._known:
                before = repr(self._known) if self._known else "without a version"
                raise ServerChanged(
                    f"{where}: the engine's weights were {before} and are {version!r} now: one "
                    "--policy-version is one policy; give the new one another"
                )
