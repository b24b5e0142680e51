"""Gives a sampler the weights of a published policy, and makes sure that it samples with them.

A server may answer 200 and sample with other weights all the same: a vLLM on a CPU that is told to
load weights in place does (docs/engines.md). So nothing is stored before the sampler has shown, on
fixed tokens, that it computes what the trainer computes (probe.py).

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
        how: "loaded" in place, by a "command" of the user's, or "restarted".
        seconds: from the request until the sampler had shown that it has the weights.
        difference: between the sampler's probe and the trainer's.
        limit: the largest |dlogp| that would have been accepted.
        served: the name of the policy, as the sampler says it.
    """

    how: str
    seconds: float
    difference: Difference
    limit: float
    served: str


class Pusher:
    """Pushes policies to one sampler.

    Args:
        loader: has the sampler take them.
        client: sends the requests.
        shape: of the model.
        floor: what pushes showed before.
    """

    def __init__(self, loader: Loader, client: Client, shape: ModelShape, floor: PushFloor) -> None:
        self.loader, self.shape, self.floor = loader, shape, floor
        self._client = client

    async def push(self, policy: PublishedPolicy, before: Probe | None = None) -> Push:
        """Have the sampler take a policy, and compare its probe with the trainer's.

        Args:
            before: the trainer's probe of the policy that the sampler had; None if it had none, or
                nobody knows which.

        Raises:
            LoadError: the sampler did not take the policy.
            PushError: it does not compute what the trainer computes; the message has both numbers.
            NoAnswer: it does not answer.
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
                f"{self._client.url}: it says that it has policy {policy.version}, and does not "
                f"compute it: {'; '.join(wrong)}. Nothing was sampled. Start the sampler anew; if "
                "it computes this model wrongly, see docs/engines.md",
                push,
            )
        self.floor.accept(shown)
        return push

    async def compare_the_start(self, policy: PublishedPolicy) -> Difference | None:
        """Compare a server that began with a policy, before any weights were loaded into it.

        What such a server shows is what a right load shows. Without it the first load in place
        would be compared with limits that fit every engine and model, which are wide.

        Returns:
            What it shows, which is accepted as the floor; None if the server has no weights yet, or
            began with others.

        Raises:
            LoadError: the server cannot take new weights.
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
        if served == "None":  # an embedded sampler that was started anew since has no policy
            raise EngineError(f"{self._client.url}: it was started anew and has no policy")
        if not policy.is_named(served):
            raise PushError(
                f"{self._client.url}: it was given policy {policy.name} and says that it has "
                f"{quoted(served)}"
            )
        return served

    async def _compare(self, policy: PublishedPolicy) -> tuple[Probe, Difference]:
        """The sampler's own probe, and how far it is from the trainer's and from its own cache."""
        tokens_MN, name = policy.probe.tokens_MN, await self.loader.model_name()
        # First as a sampling request, which may use keys and values that the engine kept; then with
        # the log-probs of the prompt, for which an engine computes all of it.
        kept = [await self._ask(name, row.tolist(), with_prompt=False) for row in tokens_MN]
        fresh = [await self._ask(name, row.tolist(), with_prompt=True) for row in tokens_MN]
        sampler, cached = _probe(tokens_MN, fresh), _probe(tokens_MN, kept)
        same_M = same_experts(sampler, cached).all((0, 2))
        apart_M = np.array(
            [abs(a.next_logprob - b.next_logprob) for a, b in zip(kept, fresh, strict=True)]
        )
        # Where experts differ by a near tie, the log-prob differs too; few do.
        counted_M = same_M if same_M.any() else np.ones_like(same_M)
        return sampler, replace(
            difference(policy.probe, sampler),
            cached_dlogp=float(apart_M[counted_M].max()),
            cached_disagreement=1 - float(same_experts(sampler, cached).mean()),
        )

    async def _ask(self, name: str, ids: list[int], with_prompt: bool) -> Asked:
        engine = self.loader.engine
        path, body = probe_request(engine, name, ids, with_prompt)
        answer = await self._client.post(path, body, MOST_BYTES)
        try:
            return read_answer(answer, body, engine, self.shape, f"{self._client.url}{path}")
        except EngineError as error:
            raise PushError(
                f"{error}: the server must be started with --enable-return-routed-experts, and "
                "serve the run's model"
            ) from error


def _probe(tokens_MN: np.ndarray, asked: list[Asked]) -> Probe:
    logprobs_MN = np.stack([one.logprobs_N for one in asked])
    routes_LMNK = np.stack([one.routes_LNK for one in asked], 1).astype(np.uint16)
    return Probe(tokens_MN, logprobs_MN, routes_LMNK)
