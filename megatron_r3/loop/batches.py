"""Requests of many samples to the embedded sampler are sent as one, so that a run can be repeated.

The other samples of a batch change how a sample's logits are rounded. So a request waits until
every sample under way waits for a response, and then all are sent as one. Then the batches are the
same in every run, also after a kill, and a collection can be repeated bit for bit. Example: 8
agents ask, and their 8 requests are sent as one. If two agents end after their first response, the
next 6 requests are sent as one.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

from megatron_r3.collect.client import Client
from megatron_r3.collect.engine import NoAnswer
from megatron_r3.data.engines.shape import EngineError


class _Waiting(NamedTuple):
    body: dict[str, Any]
    most_bytes: int
    future: asyncio.Future[Any]


class BatchClient(Client):
    """A client that waits until every sample under way asks; then it sends one request for all.

    Args:
        url: the sampler's address.
        timeout: seconds for a request, which is sent only once.
        under_way: how many samples are under way; `leave` counts one that has ended.
    """

    def __init__(self, url: str, timeout: float, under_way: int) -> None:
        super().__init__(url, 1, timeout, 0, 0.0)
        self._under_way = under_way
        self._waiting: list[_Waiting] = []

    async def post(self, path: str, body: Any, most_bytes: int) -> Any:
        """See `Client.post`."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(body, most_bytes, future))
        self._send_all()
        return await future

    def leave(self) -> None:
        """Note that a sample ended: it asks for no further response."""
        self._under_way -= 1
        self._send_all()

    def _send_all(self) -> None:
        if self._waiting and len(self._waiting) >= self._under_way:
            waiting, self._waiting = self._waiting, []
            # samples ask in any order, but their order in a batch must be the same in every run
            waiting.sort(key=lambda one: json.dumps(one.body))
            self._asking = asyncio.ensure_future(self._post_all(waiting))

    async def _post_all(self, waiting: list[_Waiting]) -> None:
        together = {
            **waiting[0].body,
            "input_ids": [one.body["input_ids"] for one in waiting],
            "sampling_params": [one.body["sampling_params"] for one in waiting],
        }
        try:
            most_bytes = sum(one.most_bytes for one in waiting)
            responses = await super().post("/generate", together, most_bytes)
            if not isinstance(responses, list) or len(responses) != len(waiting):
                raise EngineError(f"/generate: expected a list of {len(waiting)} responses")
        except EngineError as error:
            for one in waiting:
                if not one.future.done():
                    one.future.set_exception(NoAnswer(str(error)))
            return
        for response, one in zip(responses, waiting, strict=True):
            if not one.future.done():
                one.future.set_result(response)
