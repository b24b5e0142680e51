"""One sample of one prompt: asked for, decoded, checked, confirmed, and rewarded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_r3.engines.shape import EngineError
from megatron_r3.rollout import Rollout
from megatron_r3.rollouts.client import Client, NoAnswer, answer_limit
from megatron_r3.rollouts.progress import Progress
from megatron_r3.rollouts.prompts import Prompt
from megatron_r3.rollouts.requests import (
    Sampling,
    answer_of,
    build_request,
    decoder,
    policies_of,
    refuse_nameless,
)
from megatron_r3.rollouts.reward import RewardFunction, RewardSample, RewardThread, score
from megatron_r3.rollouts.server import EnginePolicy, Identity, Watch
from megatron_r3.rollouts.verify import Model
from megatron_r3.store import StoreInfo


class GivenUp(Exception):
    """There is no rollout of this sample; the message names the prompt and says why."""


@dataclass(frozen=True)
class _Answer:
    """What is kept of a response: the body itself may be many times as large."""

    decoded: Rollout
    text: str
    reason: str
    policies: list[str]


class Sampler:
    """Makes rollouts of a plan's prompts.

    Args:
        client, engine: whom it asks, and how.
        plan: what is collected.
        watch: of the server that the client asks.
        policy: of that server's weights.
        progress: counts.
    """

    def __init__(
        self,
        client: Client,
        engine: str,
        plan: Plan,
        watch: Watch,
        policy: EnginePolicy,
        progress: Progress,
    ) -> None:
        self.plan, self.progress = plan, progress
        self._client, self._engine, self._watch, self._policy = client, engine, watch, policy
        self._decode = decoder(engine)
        self._rewards = RewardThread()

    def close(self) -> None:
        """End the thread of the rewards, after the one that it is at."""
        self._rewards.close()

    async def sample(self, prompt: Prompt, index: int) -> Rollout:
        """One rollout, of a response that the server confirmed to have sampled.

        Raises:
            GivenUp: no answer, or none that can be used.
            ServerChanged: the server, or its weights, are others.
            RewardError: the reward function failed.
        """
        plan, where = self.plan, f"{prompt.where}, sample {index}"
        for attempt in range(plan.refused_retries + 1):
            try:
                answer = await self._ask(prompt, index, where)
            except NoAnswer as error:
                raise GivenUp(f"{where}: {error}") from error
            except EngineError as error:
                self.progress.refused += 1
                if attempt == plan.refused_retries:
                    why = str(error) if str(error).startswith(where) else f"{where}: {error}"
                    raise GivenUp(f"{why} ({attempt + 1} responses refused)") from error
            else:
                return await self._reward(answer, prompt, index, where)
        raise AssertionError("unreachable")

    async def _ask(self, prompt: Prompt, index: int, where: str) -> _Answer:
        """A response that can be used.

        Raises:
            EngineError: it cannot.
        """
        plan = self.plan
        seed = plan.sampling.seed_of(prompt.group, index, plan.policy_version)
        model = self._watch.start.model if self._engine == "vllm" else ""
        path, body = build_request(self._engine, prompt, plan.sampling, seed, model)
        most = answer_limit(plan.model.shape, prompt, plan.sampling.max_tokens)
        # the response is not kept: while its server is asked, others come
        answer = self._read(await self._client.post(path, body, most), body, model, where)
        self._policy.check(answer.policies, where)
        await self._watch.confirm()
        return answer

    def _read(self, response: Any, body: dict[str, Any], model: str, where: str) -> _Answer:
        try:  # the decoder compares it with what was asked, and with what a model can sample
            samples = self._decode(response, body, self.plan.model.shape, where)
            if len(samples) != 1:
                raise EngineError(f"{where}: {len(samples)} samples in the response to 1 request")
            refuse_nameless(response, model, where)
            text, reason = answer_of(response, 0, where)
            policies = policies_of(response, 0, where)
        except EngineError:
            raise
        except Exception as error:  # JSON of some other service: a list where an object is, ...
            raise EngineError(f"{where}: the response cannot be read ({error!r})") from error
        return _Answer(samples[0], text, reason, policies)

    async def _reward(self, answer: _Answer, prompt: Prompt, index: int, where: str) -> Rollout:
        plan, decoded = self.plan, answer.decoded
        tokens, length = decoded.tokens_N.tolist(), decoded.prompt_length
        seen = RewardSample(
            prompt.fields,
            tokens[:length],
            tokens[length:],
            answer.text,
            answer.reason,
            prompt.group,
            index,
        )
        reward = await self._rewards.run(score, plan.reward, seen, where)
        rollout = replace(
            decoded,
            reward=reward,
            group=prompt.group,
            sample=index,
            policy_version=plan.policy_version,
            prompt_digest=prompt.digest,
        )
        rollout.check(where)
        self.progress.tokens += int(rollout.response_N.sum())
        return rollout


# What to collect: prompts, how to sample, what rewards, and where it goes.

BIAS = (
    "the policy loss takes all log-probs at temperature 1 over the whole vocabulary, so its ratio "
    "would compare two distributions and its gradient would be biased"
)


@dataclass(frozen=True)
class Plan:
    """What to collect.

    Attributes:
        prompts, n: so many samples of each prompt.
        sampling: how.
        reward: of each response.
        model: that the server runs.
        out: the store; what it has of this policy version is not sampled again.
        policy_version: which policy samples.
        shard_size: rollouts of a shard, or more, so that groups stay whole; a kill loses those that
            wait for theirs to be full.
        refused_retries: how often a sample is asked for again after a response that cannot be used.
        biased_sampling: take sampling that the policy loss does not know.
    """

    prompts: Sequence[Prompt]
    n: int
    sampling: Sampling
    reward: RewardFunction
    model: Model
    out: Path
    policy_version: int = 0
    shard_size: int = 128
    refused_retries: int = 2
    biased_sampling: bool = False

    def check(self, engine: str) -> None:
        """Refuse what no server needs to be asked about.

        Raises:
            ValueError: sampling that the loss does not know, or a prompt that cannot be asked.
        """
        unknown = self.sampling.settings.unknown_to_the_loss()
        if unknown and not self.biased_sampling:
            raise ValueError(
                f"{', '.join(unknown)}: {BIAS}; --biased-sampling collects all the same"
            )
        for prompt in self.prompts:
            build_request(engine, prompt, self.sampling, None, "")
            prompt.check_vocabulary(self.model.vocab_size)
            prompt.check_json()

    def store_info(self, engine: str, server: Identity) -> StoreInfo:
        """What the store says of all its rollouts."""
        model = self.model
        return StoreInfo.of_model(
            model.shape,
            engine,
            server.version or "unknown",
            model=model.name,
            router_fingerprint=model.router_fingerprint,
            policy_stamp=model.policy_stamp,
            engine_policy=server.policy,
            vocab_size=model.vocab_size or 0,
            sampling=self.sampling.settings,
        )
