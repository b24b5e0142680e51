"""The collector of a run: for each collection it waits for the policy, pushes it, and samples.

A stored collection is not sampled again, so the collector can be killed and started again at any
moment. With the embedded sampler a run that was killed has the same rollouts as one that was not,
bit for bit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_r3.collect.client import Client
from megatron_r3.collect.collect import CollectError, collect
from megatron_r3.collect.engine import EngineChanged, Identity
from megatron_r3.collect.prompt_plan import Plan, Sampling, read_model, sampling_for
from megatron_r3.collect.prompts import Prompt, read_prompts
from megatron_r3.collect.reward import load_reward
from megatron_r3.collect.server import Server
from megatron_r3.data.engines.shape import EngineError, ModelShape
from megatron_r3.loop.batches import BatchClient
from megatron_r3.loop.collected import Collected, end_tokens, measured
from megatron_r3.loop.config import Config, ConfigError
from megatron_r3.loop.examine_collection import examine_shard
from megatron_r3.loop.loading import Loader, LoadError
from megatron_r3.loop.probe import Difference, Probe
from megatron_r3.loop.published import (
    PublishedPolicy,
    published,
    read_policy,
    wait_for_policy,
)
from megatron_r3.loop.push import Push, Pusher, PushError
from megatron_r3.loop.push_floor import PushFloor

PART = "collector"
TRIES = 5  # attempts at a collection if the sampler fails or restarts
_PAUSE_S = 1.0
_RETRIES, _RETRY_PAUSE_S = 8, 0.25


class Collector:
    """Samples the collections of a run, one after the other.

    Raises:
        ValueError: the config's prompts, reward, model or sampling cannot be used.
    """

    def __init__(self, config: Config) -> None:
        self.config, self.directory = config, config.directory
        self.prompts = read_prompts(config.path(config.prompts.file))
        name, folder = config.prompts.reward, config.file.parent
        self.reward = load_reward(name, folder, "[prompts] reward") if name else None
        self.shape = ModelShape.from_hf_config(config.path(config.policy.model))
        self.name = config.path(config.policy.model).name
        sampler = config.sampler
        plain = Sampling(
            sampler.max_tokens, sampler.temperature, sampler.top_p, sampler.top_k, config.run.seed
        )
        try:
            self.sampling = sampling_for(_KIND[sampler.engine], plain)
        except ValueError as error:
            raise ConfigError(f"{config.file}: [sampler] {error}") from error
        self._sampler: Callable[..., Any] | None = None  # makes a sampler that runs the agent
        if config.collector.agent:
            from megatron_r3.record.agent_sampler import sampler_of
            from megatron_r3.record.chat_template import ChatTemplate

            agent = load_reward(config.collector.agent, folder, "[collector] agent")
            template = ChatTemplate(config.path(config.policy.model))
            self._sampler = sampler_of(agent, template, one_rollout=True)
        self._pushed: Push | None = None
        self._version = -1  # the version of the policy that was pushed last
        self._ends = end_tokens(config.path(config.policy.model))
        lag, size = config.run.lag, config.prompts.per_collection
        if len(self.prompts) < (needed := (lag + 1) * size):
            raise ConfigError(
                f"{config.path(config.prompts.file)}: {len(self.prompts)} prompts; policy 0 "
                f"samples {lag + 1} x {size} prompts ([run] lag + 1 collections), and no prompt "
                f"twice: give {needed} or more, or lower [prompts] per_collection or [run] lag"
            )

    def run(self) -> None:
        """Sample every collection that is not stored yet.

        Raises:
            ValueError: a policy was not published in time, a push was refused, a reward failed, the
                truth test has an alarm, or five attempts at a collection failed.
        """
        stored = Collected(self.config).count()
        events = self.directory.read_events(PART, "collected")
        noted = {event["collection"] for event in events}
        for number in sorted({*range(stored)} - noted):
            self._note_collected(number)  # the collector was killed before it wrote this event
        for number in range(stored, self.config.run.collections):
            policy = self._wait_for(self.config.version_of(number))
            self._collect(number, policy)

    def prompts_of(self, collection: int) -> list[Prompt]:
        """The prompts of a collection; the last prompt of the file is followed by the first."""
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
        """Push the policy and sample; push and sample again if the sampler fails or restarts."""
        for attempt in range(TRIES):
            try:
                if self._pushed is None or self._version != policy.version:
                    self._pushed, self._version = self._push(policy), policy.version
                self._sample(number, policy, self._pushed.served)
                return
            except LoadError:
                raise  # a second try would not help
            except (CollectError, EngineChanged, EngineError) as error:
                self._pushed = None
                self.directory.note(PART, "failed", collection=number, reason=str(error))
                if attempt == TRIES - 1:
                    raise
                time.sleep(_PAUSE_S)

    def _push(self, policy: PublishedPolicy) -> Push:
        policy.check_files()
        config = self.config.sampler
        client, floor, wait = self._client(), self._floor(), self.config.run.wait
        # Loading weights may take long, and must not be asked for again meanwhile.
        patient = Client(config.url, 1, wait, 0, _RETRY_PAUSE_S)
        loader = Loader(config.engine, patient, config.in_place, config.push, wait_s=wait)
        pusher = Pusher(loader, client, self.shape, floor)

        async def whole() -> Push:
            try:
                if config.in_place and not floor.before and policy.version == 0:
                    self._note_start(policy, await pusher.compare_the_start(policy))
                return await pusher.push(policy, self._before(policy.version))
            finally:
                await client.close()
                await patient.close()

        try:
            push = asyncio.run(whole())
        except PushError as error:
            if error.push is not None:
                self._note(policy, error.push, verified=False)
            raise
        self._note(policy, push, verified=True)
        return push

    def _before(self, version: int) -> Probe | None:
        """The probe of the last verified policy of another version.

        None if no policy of another version was verified, or if that policy's files were removed.
        """
        pushed = [
            int(event["version"])
            for event in self.directory.read_events(PART, "pushed")
            if event["verified"] and event["version"] != version
        ]
        if not pushed or pushed[-1] not in published(self.directory.policies):
            return None
        return read_policy(self.directory.policies, pushed[-1]).probe

    def _note_start(self, policy: PublishedPolicy, shown: Difference | None) -> None:
        """Write the event `compared`; or print that the first push is checked against wide limits.

        Args:
            shown: what `Pusher.compare_the_start` returned.
        """
        if shown is not None:
            self.directory.note(PART, "compared", version=policy.version, **_numbers(shown))
        elif self.config.sampler.engine != "embedded":
            print(
                f"{self.config.sampler.url}: the server did not start with policy {policy.version} "
                "(by its log-probs and routes), so the first push is checked against wide limits",
                flush=True,
            )

    def _note(self, policy: PublishedPolicy, push: Push, verified: bool) -> None:
        self.directory.note(
            PART,
            "pushed",
            version=policy.version,
            seconds=push.seconds,
            how=push.how,
            verified=verified,
            limit=push.limit,
            **_numbers(push.difference),
        )

    def _floor(self) -> PushFloor:
        """The floor from the run's events `compared` and `pushed`, also those before a restart."""
        floor = PushFloor()
        for event in self.directory.read_events(PART, "compared", "pushed"):
            if event.get("verified", True):  # `compared` does not say it
                floor.accept(
                    Difference(
                        event["abs_dlogp"],
                        event.get("abs_dlogp_all") or event["abs_dlogp"],
                        tuple(event["route_agreement"]),
                        left_out=event.get("left_out"),
                    )
                )
        return floor

    def _client(self) -> Client:
        sampler = self.config.sampler
        return Client(sampler.url, sampler.concurrency, sampler.timeout, _RETRIES, _RETRY_PAUSE_S)

    def _sample(self, number: int, policy: PublishedPolicy, served: str) -> None:
        started = time.monotonic()
        config, prompts = self.config, self.prompts_of(number)
        whole, examined = not config.sampler.shard_size, config.sampler.examine
        note = partial(self.directory.note, PART)
        plan = Plan(
            prompts=prompts,
            n=config.prompts.samples,
            sampling=self.sampling,
            reward=self.reward,
            # all policies of a run are stored under one name: that of [policy] model
            model=replace(read_model(policy.path), name=self.name),
            out=self.directory.rollouts,
            policy_version=policy.version,
            shard_size=config.sampler.shard_size or config.rollouts_per_collection,
            refused_retries=0 if config.sampler.engine == "embedded" else 2,
            all_or_nothing=whole,
            whole_groups=True,
            check=partial(examine_shard, policy, examined, note) if examined else None,
        )
        total, sampler = config.rollouts_per_collection, self._sampler
        if config.sampler.engine == "embedded":
            client = BatchClient(config.sampler.url, config.run.wait, total)
            engine = Server("sglang", client, self.shape, self.sampling)
            engine.name = "transformers"  # the engine's name in the store
            concurrency = total
            if sampler is not None:
                sampler = partial(sampler, leave=client.leave)
        else:
            engine = Server(config.sampler.engine, self._client(), self.shape, self.sampling)
            concurrency = config.sampler.concurrency
        collect(engine, plan, concurrency, partial(_refuse_other, served), sampler)
        self._note_collected(number, seconds=time.monotonic() - started)

    def _note_collected(self, number: int, **fields: float) -> None:
        """Write the event `collected`, with numbers from the store."""
        found = measured(self.config, number, self._ends)
        self.directory.note(PART, "collected", collection=number, **found, **fields)


def _refuse_other(served: str, identity: Identity) -> None:
    """Refuse to sample with a server that no longer reports the policy that was pushed.

    Args:
        served: the policy that the server reported when the push was verified.
    """
    if served not in (identity.policy, identity.model):
        raise EngineChanged(
            f"the sampler had policy {served} and now has {identity.policy!r}, model "
            f"{identity.model!r}: was it started anew?"
        )


def _numbers(shown: Difference) -> dict[str, Any]:
    """The fields of the events `compared` and `pushed` that show a difference."""
    return {
        "abs_dlogp": shown.abs_dlogp,
        "route_agreement": list(shown.agreement),
        "cached_dlogp": shown.cached_dlogp,
        "cached_disagreement": shown.cached_disagreement,
        "abs_dlogp_all": shown.abs_dlogp_all,
        "left_out": shown.left_out,
    }


# the engine's name in `sampling_for`, by its name in the config
_KIND = {"embedded": "transformers", "sglang": "sglang", "vllm": "vllm"}
