"""Gives a sampler the weights of a published policy, and makes sure that it samples with them.

A server may answer 200 and sample with other weights all the same: a vLLM on a CPU that is told to
load weights in place does (docs/engines.md). So nothing is stored before the sampler has shown, on
fixed tokens, that it computes what the trainer computes (probe.py).

Shape suffixes (docs/glossary.md): L, N, P, K.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_r3.engines.shape import EngineError, ModelShape
from megatron_r3.online.probe_requests import Asked, probe_request, read_answer
from megatron_r3.policies.probe import Difference, Floor, Probe, difference
from megatron_r3.policies.published import PublishedPolicy, version_name
from megatron_r3.rollouts.client import Client
from megatron_r3.untrusted import quoted

_MOST_BYTES = 1 << 28
POLL_S = 0.2


class PushError(EngineError):
    """The sampler does not sample with the policy that it was given.

    Attributes:
        push: what it showed; None where it did not come to that.
    """

    def __init__(self, message: str, push: Push | None = None) -> None:
        super().__init__(message)
        self.push = push


@dataclass(frozen=True)
class Push:
    """A push, as far as the sampler says that it has the policy.

    Attributes:
        how: "loaded" in place, or "restarted".
        seconds: from the request until the sampler had shown that it has the weights.
        difference: between the sampler's probe and the trainer's.
        limit: the largest |dlogp| that would have been accepted.
    """

    how: str
    seconds: float
    difference: Difference
    limit: float


class Pusher:
    """Pushes policies to one sampler.

    Args:
        engine: embedded, sglang or vllm.
        client: sends the requests.
        shape: of the model.
        in_place: whether the running server loads new weights; else a new server is waited for.
        wait_s: how long.
        floor: what pushes showed before.
    """

    def __init__(
        self,
        engine: str,
        client: Client,
        shape: ModelShape,
        *,
        in_place: bool,
        wait_s: float,
        floor: Floor,
    ) -> None:
        self.engine, self.shape, self.in_place = engine, shape, in_place
        self.wait_s, self.floor = wait_s, floor
        self._client = client

    async def push(self, policy: PublishedPolicy) -> Push:
        """Have the sampler take a policy, and compare its probe with the trainer's.

        Raises:
            PushError: the sampler did not take the policy, or does not compute what the trainer
                computes; the message has both numbers.
            NoAnswer: the sampler does not answer.
        """
        if self.in_place:
            await self._wait_until_up()
        started = time.monotonic()
        if self.in_place:
            await self._load(policy)
        else:
            await self._wait_for_restart(policy)
        await self._check_version(policy)
        shown = difference(policy.probe, *await self._probe(policy))
        how = "loaded" if self.in_place else "restarted"
        push = Push(how, time.monotonic() - started, shown, self.floor.limits[0])
        if wrong := self.floor.judge(shown):
            raise PushError(
                f"{self._client.url}: it says that it has policy {policy.version}, and does not "
                f"compute it: {'; '.join(wrong)}. Nothing was sampled. Start the sampler anew; if "
                "it computes this model wrongly, see docs/engines.md",
                push,
            )
        self.floor.accept(shown)
        return push

    async def _load(self, policy: PublishedPolicy) -> None:
        """SGLang's request, which also empties the prefix cache."""
        body = {
            "model_path": str(policy.path),
            "weight_version": version_name(policy.version),
            "flush_cache": True,
        }
        answer = await self._client.post("/update_weights_from_disk", body, _MOST_BYTES)
        if not isinstance(answer, Mapping) or answer.get("success") is not True:
            raise PushError(
                f"{self._client.url}: it did not load {policy.path}: {quoted(answer, 300)}"
            )

    async def _wait_until_up(self) -> None:
        """Wait for a server that is still starting."""
        end = time.monotonic() + self.wait_s
        while True:
            try:
                await self._served()
                return
            except EngineError:
                if time.monotonic() > end:
                    raise
            await asyncio.sleep(POLL_S)

    async def _wait_for_restart(self, policy: PublishedPolicy) -> None:
        """Wait for the server of this policy, which whoever runs servers starts."""
        end, seen = time.monotonic() + self.wait_s, ""
        while time.monotonic() < end:
            try:
                seen = await self._served()
                if seen == version_name(policy.version):
                    return
            except EngineError:
                pass  # no server yet
            await asyncio.sleep(POLL_S)
        raise PushError(
            f"{self._client.url}: no server of policy {policy.version} within {self.wait_s:g} s"
            + (f"; there is one of {quoted(seen)}" if seen else "")
        )

    async def _served(self) -> str:
        """The name of the policy that the server says it has."""
        if self.engine == "vllm":
            page = await self._client.get("/v1/models")
            return str(page["data"][0]["id"])
        # not /server_info, whose version SGLang 0.5.23 keeps from its start
        page = await self._client.get("/model_info")
        return str(page.get("weight_version"))

    async def _check_version(self, policy: PublishedPolicy) -> None:
        served, wanted = await self._served(), version_name(policy.version)
        if served == "None":  # an embedded sampler that was started anew since has no policy
            raise EngineError(f"{self._client.url}: it was started anew and has no policy")
        if served != wanted:
            raise PushError(
                f"{self._client.url}: it was given policy {wanted} and says that it has "
                f"{quoted(served)}"
            )

    async def _probe(self, policy: PublishedPolicy) -> tuple[Probe, float]:
        """The sampler's own probe, and how far kept keys and values lead away from it."""
        tokens_PN = policy.probe.tokens_PN
        # First as a sampling request, which may use keys and values that the engine kept; then with
        # the log-probs of the prompt, for which an engine computes all of it.
        kept = [await self._ask(policy, row.tolist(), with_prompt=False) for row in tokens_PN]
        fresh = [await self._ask(policy, row.tolist(), with_prompt=True) for row in tokens_PN]
        cached = max(
            abs(a.next_logprob - b.next_logprob) if a.next_token == b.next_token else 0.0
            for a, b in zip(kept, fresh, strict=True)
        )
        logprobs_PN = np.stack([one.logprobs_N for one in fresh])
        routes_LPNK = np.stack([one.routes_LNK for one in fresh], 1).astype(np.uint16)
        return Probe(tokens_PN, logprobs_PN, routes_LPNK), cached

    async def _ask(self, policy: PublishedPolicy, ids: list[int], with_prompt: bool) -> Asked:
        name = version_name(policy.version)
        path, body = probe_request(self.engine, name, ids, with_prompt)
        answer = await self._client.post(path, body, _MOST_BYTES)
        return read_answer(answer, body, self.engine, self.shape, f"{self._client.url}{path}")
