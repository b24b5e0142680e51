"""Gives a sampler the weights of a published policy, and makes sure that it samples with them.

A server may answer 200 and still sample with other weights, as vLLM does on a CPU when told to load
weights in place (docs/engines.md). So nothing is sampled before the server has shown, on fixed
tokens, that it computes what the trainer computes (probe.py).

Shape suffixes (docs/glossary.md): L, N, M, K.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from megatron_r3.collect.client import Client
from megatron_r3.data.engines.shape import EngineError, ModelShape
from megatron_r3.loop.loading import MOST_BYTES, Loader, LoadError
from megatron_r3.loop.probe import Difference, Probe, difference, same_experts
from megatron_r3.loop.probe_requests import Asked, probe_request, read_answer
from megatron_r3.loop.published import PublishedPolicy
from megatron_r3.loop.push_floor import PushFloor, still_before
from megatron_r3.replay.words import quoted


class PushError(LoadError):
    """The sampler does not sample with the policy that was pushed.

    Attributes:
        push: what the sampler showed; None if no probe was compared.
    """

    def __init__(self, message: str, push: Push | None = None) -> None:
        super().__init__(message)
        self.push = push


@dataclass(frozen=True)
class Push:
    """What a push of a policy to a sampler showed.

    Attributes:
        how: "loaded" in place, by a "command" of the user, or "restarted".
        seconds: from the request until the sampler's probe was compared.
        difference: between the sampler's probe and the trainer's.
        limit: the largest mean |log-prob difference| that is accepted.
        served: the name of the policy, as the sampler reports it.
    """

    how: str
    seconds: float
    difference: Difference
    limit: float
    served: str


class Pusher:
    """Pushes policies to one sampler.

    Args:
        loader: loads the policies into the sampler.
        client: sends the probe's requests.
        shape: the model's MoE layers, experts and top-k.
        floor: the differences of earlier pushes.
    """

    def __init__(self, loader: Loader, client: Client, shape: ModelShape, floor: PushFloor) -> None:
        self.loader, self.shape, self.floor = loader, shape, floor
        self._client = client

    async def push(self, policy: PublishedPolicy, before: Probe | None = None) -> Push:
        """Load a policy into the sampler, and compare the sampler's probe with the trainer's.

        Args:
            before: the trainer's probe of the policy that the sampler had; None if unknown.

        Raises:
            LoadError: the sampler did not load the policy.
            PushError: the sampler does not compute what the trainer computes; the message has the
                difference and its limit. Or its answers cannot be compared.
            EngineError: the sampler does not answer, or was restarted after the policy was loaded.
            ValueError: this host does not have the command of [sampler] push.
        """
        if self.loader.in_place:
            await self.loader.wait_until_up()
        started = time.monotonic()
        await self.loader.take(policy)
        served = await self._check_version(policy)
        sampler, shown = await self._compare(policy)
        seconds = time.monotonic() - started
        push = Push(self.loader.how, seconds, shown, self.floor.dlogp_limit(shown).most, served)
        wrong = self.floor.judge(shown)
        if before is not None and (stale := still_before(sampler, policy.probe, before)):
            wrong.append(stale)
        if wrong:
            raise PushError(
                f"{self._client.url}: the sampler says that it has policy {policy.version}, but "
                f"does not compute it: {'; '.join(wrong)}. Nothing was sampled. Start the sampler "
                "anew; if that does not help, its engine may compute this model wrongly "
                "(docs/engines.md)",
                push,
            )
        self.floor.accept(shown)
        return push

    async def compare_the_start(self, policy: PublishedPolicy) -> Difference | None:
        """Compare a server that was started with a policy, before weights are loaded into it.

        Such a server has the right weights, so its difference from the trainer is one that a right
        load may have. Without this difference the first load would be checked against the limits of
        a first push. These limits are wide, because they fit every engine and model.

        Returns:
            The difference, which the floor then remembers; None if the server has no weights yet,
            or the difference is above the limits of a first push.

        Raises:
            LoadError: the server cannot take new weights, or its answers cannot be compared.
            EngineError: the server does not answer.
        """
        served = await self.loader.wait_until_up()
        if served == "None":
            return None
        _, shown = await self._compare(policy)
        if self.floor.judge(shown):
            return None
        self.floor.accept(shown)
        return shown

    async def _check_version(self, policy: PublishedPolicy) -> str:
        served = await self.loader.served()
        if served == "None":  # an embedded sampler that was restarted has no policy
            raise EngineError(f"{self._client.url}: the sampler was restarted, without a policy")
        if not policy.is_named(served):
            raise PushError(
                f"{self._client.url}: the sampler was given policy {policy.name} and says that it "
                f"has {quoted(served)}"
            )
        return served

    async def _compare(self, policy: PublishedPolicy) -> tuple[Probe, Difference]:
        """The sampler's probe, and its difference from the trainer's probe.

        The difference also compares the sampler's answers with and without the prefix cache.
        """
        tokens_MN, name = policy.probe.tokens_MN, await self.loader.model_name()
        # The first requests are like those for samples, and may use the prefix cache. The second
        # ones ask for the log-probs of the prompt: for these an engine computes the prompt anew.
        kept = [await self._ask(name, row.tolist(), with_prompt=False) for row in tokens_MN]
        fresh = [await self._ask(name, row.tolist(), with_prompt=True) for row in tokens_MN]
        sampler, cached = _probe(tokens_MN, fresh), _probe(tokens_MN, kept)
        same_M = same_experts(sampler, cached).all((0, 2))
        apart_M = np.array(
            [abs(a.next_logprob - b.next_logprob) for a, b in zip(kept, fresh, strict=True)]
        )
        # Rounding may choose other experts where scores nearly tie, and then the log-prob differs
        # too. A sequence with other experts counts only if every sequence has some.
        counted_M = same_M if same_M.any() else np.ones_like(same_M)
        return sampler, replace(
            difference(policy.probe, sampler),
            cached_dlogp=float(apart_M[counted_M].max()),
            cached_disagreement=1 - float(same_experts(sampler, cached).mean()),
        )

    async def _ask(self, name: str, ids: list[int], with_prompt: bool) -> Asked:
        # the embedded sampler takes SGLang's requests
        dialect = "vllm" if self.loader.engine == "vllm" else "sglang"
        path, body = probe_request(dialect, name, ids, with_prompt)
        answer = await self._client.post(path, body, MOST_BYTES)
        try:
            return read_answer(answer, body, dialect, self.shape, f"{self._client.url}{path}")
        except EngineError as error:
            raise PushError(
                f"{error}: start the server with --enable-return-routed-experts, and with the "
                "run's model"
            ) from error


def _probe(tokens_MN: np.ndarray, asked: list[Asked]) -> Probe:
    logprobs_MN = np.stack([one.logprobs_N for one in asked])
    routes_LMNK = np.stack([one.routes_LNK for one in asked], 1).astype(np.uint16)
    return Probe(tokens_MN, logprobs_MN, routes_LMNK)
