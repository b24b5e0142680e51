"""The collector of a run: for each collection it waits for the policy, pushes it, and samples.

What was collected before is not collected again, so the part can be killed and started again at any
moment. With the embedded sampler the rollouts are then the same, bit for bit.

Shape suffixes (docs/glossary.md): K, L, M, N, T.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from megatron_r3.engines.shape import EngineError, ModelShape
from megatron_r3.online.batches import BatchServer
from megatron_r3.online.config import Config, ConfigError
from megatron_r3.online.push import Push, Pusher, PushError
from megatron_r3.online.sampler import Collected
from megatron_r3.policies.probe import Difference, Floor
from megatron_r3.policies.published import PublishedPolicy, version_name, wait_for_policy
from megatron_r3.rollouts.client import Client
from megatron_r3.rollouts.collect import CollectError, collect
from megatron_r3.rollouts.engine import EngineChanged, Identity
from megatron_r3.rollouts.plan import Model, Plan, Sampling, read_model, sampling_for
from megatron_r3.rollouts.prompts import Prompt, read_prompts
from megatron_r3.rollouts.reward import load_reward
from megatron_r3.rollouts.server import Server
from megatron_r3.store import RolloutStore

PART = "collector"
TRIES = 5  # how often a collection is begun anew after the sampler went away
_PAUSE_S = 1.0
_RETRIES, _RETRY_PAUSE_S = 8, 0.25


class Collector:
    """Samples the collections of a run, one after the other.

    Raises:
        ValueError: the config names prompts, a reward or a model that cannot be used.
    """

    def __init__(self, config: Config) -> None:
        self.config, self.directory = config, config.directory
        self.prompts = read_prompts(config.path(config.prompts.file))
        self.reward = load_reward(config.prompts.reward)
        self.shape = ModelShape.from_hf_config(config.path(config.policy.model))
        self.name = config.path(config.policy.model).name
        sampler = config.sampler
        plain = Sampling(
            sampler.max_tokens, sampler.temperature, sampler.top_p, sampler.top_k, config.run.seed
        )
        self.sampling = sampling_for(_KIND[sampler.engine], plain, biased=False)
        self._pushed: int | None = None
        needed = (config.run.lag + 1) * config.prompts.per_collection
        if config.run.lag and len(self.prompts) < needed:
            raise ConfigError(
                f"{config.path(config.prompts.file)}: {len(self.prompts)} prompts; with lag "
                f"{config.run.lag} policy 0 samples {config.run.lag + 1} collections of "
                f"{config.prompts.per_collection}, which must be different prompts: {needed}"
            )
        if len(self.prompts) < config.prompts.per_collection:
            raise ConfigError(
                f"{config.path(config.prompts.file)}: {len(self.prompts)} prompts; a collection "
                f"has {config.prompts.per_collection}"
            )

    def run(self) -> None:
        """Sample every collection that is not there yet.

        Raises:
            ValueError: a push that is refused, a reward that fails, a policy that does not come.
        """
        for number in range(Collected(self.config).count(), self.config.run.collections):
            policy = self._wait_for(self.config.version_of(number))
            self._collect(number, policy)

    def prompts_of(self, collection: int) -> list[Prompt]:
        """The prompts of a collection; after the last one the first one comes again."""
        size = self.config.prompts.per_collection
        first = collection * size
        return [self.prompts[i % len(self.prompts)] for i in range(first, first + size)]

    def _wait_for(self, version: int) -> PublishedPolicy:
        started = time.monotonic()
        policy = wait_for_policy(self.directory.policies, version, self.config.run.wait)
        seconds = time.monotonic() - started
        if seconds > _PAUSE_S:
            self.directory.note(PART, "waited", seconds=seconds, **{"for": f"policy {version}"})
        return policy

    def _collect(self, number: int, policy: PublishedPolicy) -> None:
        """Push the policy and sample; both again where the sampler went away in between."""
        for attempt in range(TRIES):
            try:
                if self._pushed != policy.version:
                    self._push(policy)
                self._sample(number, policy)
                return
            except PushError:
                raise  # the sampler answered, and what it answered is wrong
            except (CollectError, EngineChanged, EngineError) as error:
                self._pushed = None
                self.directory.note(PART, "failed", collection=number, reason=str(error))
                if attempt == TRIES - 1:
                    raise
                time.sleep(_PAUSE_S)

    def _push(self, policy: PublishedPolicy) -> None:
        policy.check_files()
        config = self.config.sampler
        client = self._client()
        pusher = Pusher(
            config.engine,
            client,
            self.shape,
            in_place=config.in_place,
            wait_s=self.config.run.wait,
            floor=self._floor(),
        )
        try:
            push = asyncio.run(_closing(client, pusher.push(policy)))
        except PushError as error:
            if error.push is not None:
                self._note(policy, error.push, verified=False)
            raise
        self._pushed = policy.version
        self._note(policy, push, verified=True)

    def _note(self, policy: PublishedPolicy, push: Push, verified: bool) -> None:
        self.directory.note(
            PART,
            "pushed",
            version=policy.version,
            seconds=push.seconds,
            how=push.how,
            verified=verified,
            abs_dlogp=push.difference.abs_dlogp,
            limit=push.limit,
            cached_dlogp=push.difference.cached_dlogp,
            route_agreement=list(push.difference.agreement),
        )

    def _floor(self) -> Floor:
        """What pushes showed before, also before this part was killed."""
        floor = Floor()
        for event in self.directory.read_events(PART):
            if event.get("event") == "pushed" and event["verified"]:
                floor.accept(
                    Difference(
                        float(event["abs_dlogp"]),
                        tuple(event["route_agreement"]),
                        float(event["cached_dlogp"]),
                    )
                )
        return floor

    def _client(self) -> Client:
        sampler = self.config.sampler
        return Client(sampler.url, sampler.concurrency, sampler.timeout, _RETRIES, _RETRY_PAUSE_S)

    def _sample(self, number: int, policy: PublishedPolicy) -> None:
        started = time.monotonic()
        config, prompts = self.config, self.prompts_of(number)
        whole = not config.sampler.shard_size
        plan = Plan(
            prompts=prompts,
            n=config.prompts.samples,
            sampling=self.sampling,
            reward=self.reward,
            model=self._model(policy),
            out=self.directory.rollouts,
            policy_version=policy.version,
            shard_size=config.sampler.shard_size or config.rollouts_per_collection,
            refused_retries=0 if config.sampler.engine == "embedded" else 2,
            all_or_nothing=whole,
        )
        total = config.rollouts_per_collection
        if config.sampler.engine == "embedded":
            # one request for all of it, which may take long, and is not sent twice
            client = Client(config.sampler.url, 1, config.run.wait, 0, _RETRY_PAUSE_S)
            engine: Server = BatchServer(client, self.shape, self.sampling, total)
            concurrency = total
        else:
            engine = Server(config.sampler.engine, self._client(), self.shape, self.sampling)
            concurrency = config.sampler.concurrency
        done = collect(engine, plan, concurrency, partial(_refuse_other, policy.version))
        self.directory.note(
            PART,
            "collected",
            collection=number,
            version=policy.version,
            rollouts=done.total,
            tokens=done.tokens,
            seconds=time.monotonic() - started,
            **self._measured(total),
        )

    def _model(self, policy: PublishedPolicy) -> Model:
        # all policies of a run have one name, that of the model with which it began
        return replace(read_model(policy.path), name=self.name)

    def _measured(self, total: int) -> dict[str, Any]:
        """What the report shows of the last `total` rollouts."""
        store = RolloutStore([self.directory.rollouts], mixed_policies=True)
        last = range(len(store) - total, len(store))
        reward_M = store.column("reward")[-total:]
        lengths = [int(store.rollout(i).response_N.sum()) for i in last]
        return {
            "reward": float(reward_M.mean()),
            "reward_std": float(reward_M.std()),
            "response_length": float(np.mean(lengths)),
            "length_cut": float(np.mean([n >= self.sampling.max_tokens for n in lengths])),
            "expert_load": _loads(store, last),
        }


def _refuse_other(version: int, identity: Identity) -> None:
    """Refuse to sample with a server that does not say that it has the policy that was pushed.

    Raises:
        EngineChanged: it was started anew since.
    """
    wanted = version_name(version)
    if wanted not in (identity.policy, identity.model):
        raise EngineChanged(
            f"the sampler was given policy {wanted} and now has {identity.policy!r}, model "
            f"{identity.model!r}: it was started anew"
        )


# how `sampling_for` calls the engine
_KIND = {"embedded": "transformers", "sglang": "sglang", "vllm": "vllm"}


def _loads(store: RolloutStore, rollouts: Sequence[int]) -> list[float]:
    """Of each MoE layer the load of the busiest expert, as a multiple of the mean."""
    info = store.info
    counts = np.zeros((len(info.moe_layers), info.num_experts), np.int64)
    for index in rollouts:
        ids_LTK = store.rollout(index).routes.ids_LTK
        for layer, ids_TK in enumerate(ids_LTK):
            counts[layer] += np.bincount(ids_TK.ravel(), minlength=info.num_experts)
    return (counts.max(1) / np.maximum(counts.mean(1), 1)).tolist()


async def _closing(client: Client, work: Any) -> Push:
    try:
        push: Push = await work
        return push
    finally:
        await client.close()
