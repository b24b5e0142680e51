"""The embedded sampler as the engine of a collection: one request asks for all samples.

The other samples of a batch change how a sample's logits are rounded. With one request for all
samples of a collection the batches are the same in every run, also after a kill, so that a
collection can be repeated bit for bit.
"""

from __future__ import annotations

import asyncio
from typing import Any

from megatron_r3.collect.client import Client
from megatron_r3.collect.engine import Answer, NoAnswer
from megatron_r3.collect.prompt_plan import Sampling
from megatron_r3.collect.prompts import Prompt
from megatron_r3.collect.requests import answer_limit, build_request
from megatron_r3.collect.server import Server
from megatron_r3.data.engines.shape import EngineError, ModelShape


class BatchServer(Server):
    """Waits until `sample` is called for every sample of the collection; sends one request for all.

    Args:
        client: sends the request.
        shape: the model's MoE layers, experts and top-k.
        sampling: how to sample.
        expected: how many samples the collection has.
    """

    def __init__(
        self, client: Client, shape: ModelShape, sampling: Sampling, expected: int
    ) -> None:
        super().__init__("sglang", client, shape, sampling)  # the sampler takes SGLang's requests
        self.name = "transformers"  # the engine's name in the store
        self.expected = expected
        self._waiting: list[tuple[Prompt, int | None, str, asyncio.Future[Answer]]] = []

    async def sample(self, prompt: Prompt, seed: int | None, where: str) -> Answer:
        """See `Engine.sample`."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt, seed, where, future))
        if len(self._waiting) == self.expected:
            waiting, self._waiting = self._waiting, []
            self._asking = asyncio.ensure_future(self._ask_all(waiting))
        return await future

    async def _ask_all(
        self, waiting: list[tuple[Prompt, int | None, str, asyncio.Future[Answer]]]
    ) -> None:
        bodies = [
            build_request(self.dialect, prompt, self.sampling, seed, "")[1]
            for prompt, seed, _, _ in waiting
        ]
        together: dict[str, Any] = {
            **bodies[0],
            "input_ids": [body["input_ids"] for body in bodies],
            "sampling_params": [body["sampling_params"] for body in bodies],
        }
        try:
            most_bytes = sum(
                answer_limit(self.shape, prompt, self.sampling) for prompt, _, _, _ in waiting
            )
            responses = await self._client.post("/generate", together, most_bytes)
            if not isinstance(responses, list) or len(responses) != len(bodies):
                raise EngineError(f"/generate: expected a list of {len(bodies)} responses")
            answers = [
                Answer.of(self._read(response, body, "", where))
                for response, body, (_, _, where, _) in zip(responses, bodies, waiting, strict=True)
            ]
        except EngineError as error:
            # After NoAnswer `collect` gives the sample up. After another EngineError it may call
            # `sample` again, and that call would wait for ever for the other samples.
            for _, _, _, future in waiting:
                if not future.done():
                    future.set_exception(NoAnswer(str(error)))
            return
        for answer, (_, _, _, future) in zip(answers, waiting, strict=True):
            if not future.done():
                future.set_result(answer)
