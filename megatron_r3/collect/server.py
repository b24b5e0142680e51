"""A vLLM, SGLang or Megatron server as an engine: asked for samples, and watched for changes.

Between two responses a server may be restarted, get new weights or serve another model. So each
response is used only after the server has named the version, model and weights of the start again,
as far as the server has pages that name them.

Shape suffixes (docs/glossary.md): K, L, T.
"""

from __future__ import annotations

import asyncio
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from megatron_r3.collect.client import Client
from megatron_r3.collect.engine import Answer, EngineChanged, Identity, NoAnswer
from megatron_r3.collect.prompt_plan import Sampling
from megatron_r3.collect.prompts import Prompt
from megatron_r3.collect.requests import answer_limit, build_request
from megatron_r3.data.engines import decode_increments
from megatron_r3.data.engines.conversation import Increment
from megatron_r3.data.engines.shape import EngineError, ModelShape
from megatron_r3.data.values import wrong_text
from megatron_r3.replay.routes import Routes
from megatron_r3.replay.words import quoted

# Megatron's server returns no masks: `sampling_for` refuses settings that need them.
_HOW_TO_GET_MASKS = {
    "vllm": "start the server with --enable-scale-out --return-sampling-mask --logprobs-mode "
    "processed_logprobs (0.30 or later)",
    "sglang": "SGLang 0.5.23 returns one; is the server older?",
}


class Server:
    """An engine that is a server (`engine.Engine`).

    Args:
        dialect: the server's kind of requests and responses: "vllm", "sglang" or "megatron".
        client: sends the requests.
        shape: the model's layers and experts; a response with routes of another shape is refused.
        sampling: how to sample.
    """

    def __init__(self, dialect: str, client: Client, shape: ModelShape, sampling: Sampling) -> None:
        self.name = self.dialect = dialect  # a subclass may have another name in the store
        self.shape, self.sampling = shape, sampling
        self._client, self._watch = client, Watch(client, dialect)

    def check(self, prompt: Prompt) -> None:
        """See `Engine.check`."""
        build_request(self.dialect, prompt, self.sampling, None, "")

    async def begin(self, on_retry: Callable[[], None]) -> Identity:
        """See `Engine.begin`."""
        self._client.on_retry = on_retry
        return await self._watch.begin()

    async def sample(self, prompt: Prompt, seed: int | None, where: str) -> Answer:
        """See `Engine.sample`."""
        # No variable keeps the response, so it is freed as soon as it is decoded: hundreds of
        # responses may wait for `confirm` at a time.
        return Answer.of(await self.ask(prompt, seed, where))

    async def ask(
        self,
        prompt: Prompt,
        seed: int | None,
        where: str,
        start: int = 0,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
    ) -> Increment:
        """Sample one response to a prompt, with routes from the token `start` on.

        Args:
            prompt, seed, where: as in `Engine.sample`.
            start: the token of the first row. Rows of earlier tokens, which Megatron's server
                returns too, are cut off.
            stop: texts at which the response ends.
            max_tokens: a second limit of the response's tokens beside the one of `sampling`; the
                smaller one counts. None for no second limit.

        Raises:
            NoAnswer, EngineError: as in `Engine.sample`.
        """
        model = self._watch.start.model if self.dialect == "vllm" else ""
        sampling = self._sampling(max_tokens)
        path, body = build_request(self.dialect, prompt, sampling, seed, model, start, stop)
        most_bytes = answer_limit(self.shape, prompt, sampling)
        response = await self._client.post(path, body, most_bytes)
        return self._read(response, body, model, where, start)

    def _sampling(self, max_tokens: int | None) -> Sampling:
        least = min(max_tokens or self.sampling.max_tokens, self.sampling.max_tokens)
        return replace(self.sampling, max_tokens=least)

    def _read(
        self, response: Any, body: dict[str, Any], model: str, where: str, start: int
    ) -> Increment:
        """The only sample of a response, with the rows from the token `start` on."""
        increment = self._decode(response, body, model, where)
        if (early := start - increment.start) <= 0:
            return increment
        # Megatron's server returns all rows. Those of the tokens before `start` came with earlier
        # responses, and the second time they may differ by the rounding of another batch.
        routes = increment.routes
        rows_LTK, recorded_T = routes.ids_LTK[:, early:], routes.recorded_T[early:]
        kept = Routes.from_array(rows_LTK, routes.num_experts, recorded_T, where, start)
        return replace(increment, routes=kept, start=start)

    def _decode(self, response: Any, body: dict[str, Any], model: str, where: str) -> Increment:
        try:  # the decoder compares the response with the request and with the model's shape
            samples = decode_increments(self.dialect, response, body, self.shape, where)
            if len(samples) != 1:
                raise EngineError(
                    f"{where}: the response has {len(samples)} samples; 1 was asked for"
                )
            # vLLM names the model in each response, and the decoder compares the two names.
            if model and not samples[0].said.model:
                raise EngineError(f"{where}: the response names no model; {model!r} was asked for")
            if self.sampling.wants_kept and samples[0].kept is None:
                hint = _HOW_TO_GET_MASKS[self.dialect]
                raise EngineError(f"{where}: the response has no sampling mask: {hint}")
            return samples[0]
        except EngineError:
            raise
        except Exception as error:  # JSON of some other service: a list where an object is expected
            raise EngineError(f"{where}: the response cannot be read ({error!r})") from error

    async def confirm(self) -> None:
        """See `Engine.confirm`."""
        await self._watch.confirm()

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._client.close()


def _megatron_health(page: Any) -> Mapping[str, Any]:
    if page["service"] != "Megatron Inference Server":
        raise LookupError(quoted(page["service"]))
    return {}


_Read = Callable[[Any], Mapping[str, Any]]
# The pages of each engine. A page has paths, of which the first that exists is taken, and the
# function that reads it. vLLM has /weight_info only if it takes new weights (VLLM_SERVER_DEV_MODE).
# Older SGLang calls its pages /get_... . SGLang's /server_info has a weight_version too, but in
# 0.5.23 it never changes after the start; the one of /model_info does.
_PAGES: dict[str, tuple[tuple[tuple[str, ...], _Read], ...]] = {
    "vllm": (
        (("/version",), lambda page: {"version": page["version"]}),
        (("/v1/models",), lambda page: {"model": page["data"][0]["id"]}),
        (("/weight_info",), lambda page: {"policy": page["weight_version"]}),
    ),
    "sglang": (
        (
            ("/server_info", "/get_server_info"),
            lambda page: {
                "version": page["version"],
                "model": page.get("served_model_name") or page.get("model_path"),
            },
        ),
        (
            ("/model_info", "/get_model_info"),
            lambda page: {"policy": page.get("weight_version")},
        ),
    ),
    # /server_info is a page of megatron_r3.loop.serve; upstream's script has no such page
    "megatron": (
        (("/health",), _megatron_health),
        (
            ("/server_info",),
            lambda page: {name: page[name] for name in ("version", "model", "policy")},
        ),
    ),
}


class Watch:
    """Asks a server for its identity: at the start, and again after its responses.

    Attributes:
        start: the identity at the start.
    """

    def __init__(self, client: Client, engine: str) -> None:
        self.start = Identity()
        self._client, self._engine = client, engine
        self._pages: list[tuple[str, _Read]] = []  # the pages that the server has
        self._asking = asyncio.Lock()
        self._last_number = 0  # `confirm` numbers its calls from 1 on
        self._served = 0  # calls up to this number came before the last check began
        self._failure: EngineError | None = None  # why the last check got no answer

    async def begin(self) -> Identity:
        """Ask for every page that the engine may have; `confirm` asks for those that exist.

        Raises:
            EngineError: there is no answer, or an answer that no engine of this kind gives.
        """
        names: dict[str, str] = {}
        for paths, read in _PAGES[self._engine]:
            for path in paths:
                try:
                    page = await self._client.get(path)
                except NoAnswer as error:
                    if error.status != 404:
                        raise
                    continue
                names |= self._read(page, path, read)
                self._pages.append((path, read))
                break
        self.start = Identity(**names)
        return self.start

    async def confirm(self) -> None:
        """See `Engine.confirm`. One check of the server serves all calls that came before it began.

        Example: while a check is under way for call 1, calls 2 to 30 come and wait for the lock.
        Call 2 gets the lock, sees that 30 calls have come, and asks the server. Calls 3 to 30 then
        find that this check served them too. So 30 responses cost two checks.

        Raises:
            EngineChanged: the server's identity differs from that of the start.
            NoAnswer: the server does not tell its identity.
        """
        self._last_number += 1
        number = self._last_number
        async with self._asking:
            if self._served < number:
                # The number is read before the server is asked: a call that comes during the check
                # may confirm a response that is newer than the server's answer.
                serves, self._failure = self._last_number, None
                try:
                    await self._compare()
                except EngineError as error:
                    self._failure = error
                self._served = serves
            if self._failure is not None:
                raise NoAnswer(f"cannot tell whether the server is the same: {self._failure}")

    async def _compare(self) -> None:
        pages = [self._read(await self._client.get(path), path, read) for path, read in self._pages]
        now = Identity(**dict(ChainMap(*pages)))
        for field in fields(Identity):
            before, after = getattr(self.start, field.name), getattr(now, field.name)
            if before != after:
                raise EngineChanged(
                    f"{self._client.url}: the server changed: its {field.name} was {before!r} at "
                    f"the start and is {after!r} now; responses since the last check are not stored"
                )

    def _read(self, page: Any, path: str, read: _Read) -> dict[str, str]:
        """The values on a page, by the names of `Identity`'s fields."""
        where = f"{self._client.url}{path}"
        try:
            values = read(page)
        except (AttributeError, LookupError, TypeError) as error:
            raise EngineError(
                f"{where}: no {self._engine} server has such a page ({error!r}): is "
                "another service at this address?"
            ) from error
        names = {
            name: str(value) if type(value) is int else value
            for name, value in values.items()
            if value is not None
        }
        for name, value in names.items():
            wrong = wrong_text(value)
            if wrong is not None:
                raise EngineError(f"{where}: the server's {name} must be {wrong}")
        return names
