"""The embedded sampler as the engine of a collection: one request asks for all samples at once.

The other samples of a batch change how a sample's logits are rounded. So a request waits until
every sample under way waits for a response, and then all are sent as one. Then the batches are the
same in every run, also after a kill, and a collection can be repeated bit for bit. Example: 8
agents ask, and their 8 requests are sent as one. If two agents end after their first response, the
next 6 requests are sent as one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_r3.collect.client import Client
from megatron_r3.collect.engine import NoAnswer
from megatron_r3.collect.prompt_plan import Sampling
from megatron_r3.collect.prompts import Prompt
from megatron_r3.collect.requests import answer_limit, build_request
from megatron_r3.collect.server import Server
from megatron_r3.data.engines.conversation import Increment
from megatron_r3.data.engines.shape import EngineError, ModelShape


class _Waiting(NamedTuple):
    where: str
    body: dict[str, Any]
    most_bytes: int
    start: int
    future: asyncio.Future[Increment]


class BatchServer(Server):
    """Waits until every sample that is under way asks for a response; sends one request for all.

    Args:
        client: sends the request.
        shape: the model's MoE layers, experts and top-k.
        sampling: how to sample.
        under_way: how many samples are under way; `leave` counts one that has ended.
    """

    def __init__(
        self, client: Client, shape: ModelShape, sampling: Sampling, under_way: int
    ) -> None:
        super().__init__("sglang", client, shape, sampling)  # the sampler takes SGLang's requests
        self.name = "transformers"  # the engine's name in the store
        self._under_way = under_way
        self._waiting: list[_Waiting] = []

    async def ask(
        self,
        prompt: Prompt,
        seed: int | None,
        where: str,
        start: int = 0,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
    ) -> Increment:
        """See `Server.ask`."""
        sampling = self._sampling(max_tokens)
        _, body = build_request(self.dialect, prompt, sampling, seed, "", 0, stop)
        most_bytes = answer_limit(self.shape, prompt, sampling)
        future: asyncio.Future[Increment] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(where, body, most_bytes, start, future))
        self._send()
        return await future

    def leave(self) -> None:
        """Note that a sample ended: it asks for no further response."""
        self._under_way -= 1
        self._send()

    def _send(self) -> None:
        if self._waiting and len(self._waiting) >= self._under_way:
            waiting, self._waiting = sorted(self._waiting, key=lambda one: one.where), []
            self._asking = asyncio.ensure_future(self._ask_all(waiting))

    async def _ask_all(self, waiting: list[_Waiting]) -> None:
        together: dict[str, Any] = {
            **waiting[0].body,
            "input_ids": [one.body["input_ids"] for one in waiting],
            "sampling_params": [one.body["sampling_params"] for one in waiting],
        }
        try:
            most_bytes = sum(one.most_bytes for one in waiting)
            responses = await self._client.post("/generate", together, most_bytes)
            if not isinstance(responses, list) or len(responses) != len(waiting):
                raise EngineError(f"/generate: expected a list of {len(waiting)} responses")
            increments = [
                self._read(response, one.body, "", one.where, one.start)
                for response, one in zip(responses, waiting, strict=True)
            ]
        except EngineError as error:
            # After NoAnswer `collect` gives the sample up. After another EngineError it may call
            # `sample` again, and that call would wait for ever for the other samples.
            for one in waiting:
                if not one.future.done():
                    one.future.set_exception(NoAnswer(str(error)))
            return
        for increment, one in zip(increments, waiting, strict=True):
            if not one.future.done():
                one.future.set_result(increment)
