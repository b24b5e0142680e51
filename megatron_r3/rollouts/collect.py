"""Collect rollouts: ask a server for every sample of every prompt, and store each exactly once.

What is stored says itself which samples it holds, and a shard appears whole or not at all. So after
a kill the same command reads the store, and asks for the rest.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_r3.engines.sample import Sample
from megatron_r3.engines.shape import EngineError, ModelShape
from megatron_r3.rollouts.client import Client, NoAnswer
from megatron_r3.rollouts.dialects import Sampling, answer_of, build_request, decoder
from megatron_r3.rollouts.model import Model
from megatron_r3.rollouts.progress import Progress
from megatron_r3.rollouts.prompts import Prompt
from megatron_r3.rollouts.resume import only_writer, stored_samples
from megatron_r3.rollouts.reward import RewardFunction, RewardSample, score
from megatron_r3.rollouts.rollout import to_rollout
from megatron_r3.rollouts.server import Server, served_model, version
from megatron_r3.rollouts.signals import cancelled_by_signals
from megatron_r3.store import Rollout, StoreInfo, write_shard

__all__ = ["CollectError", "Interrupted", "Plan", "collect"]

HOPELESS = 8  # so many prompts in a row without a rollout: it is the server, not the prompt


class CollectError(ValueError):
    """Rollouts are missing; the message says how many and why."""


class _HopelessError(Exception):
    """No more of this."""


class Interrupted(Exception):
    """A signal came; groups that were whole are stored.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


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


def collect(server: Server, plan: Plan) -> Progress:
    """Sample and store what is missing; returns the counts.

    Raises:
        CollectError: rollouts are missing at the end, or the server answers no prompt.
        RewardError: the reward function failed; groups that were whole before are stored.
        Interrupted: SIGINT, SIGTERM or SIGHUP came; groups that were whole before are stored.
        ValueError: server, store and plan do not belong together; nothing was sampled.
    """
    for prompt in plan.prompts:
        build_request(server.engine, prompt, plan.sampling, None, "")  # refused before any work
    return asyncio.run(_collect(server, plan))


async def _collect(server: Server, plan: Plan) -> Progress:
    progress = Progress()

    def on_retry() -> None:
        progress.retries += 1
        progress.show()

    client = Client(
        server.url, server.concurrency, server.timeout, server.retries, server.pause, on_retry
    )
    async with client:
        info = StoreInfo(
            num_experts=plan.model.shape.num_experts,
            topk=plan.model.shape.topk,
            moe_layers=plan.model.shape.moe_layers,
            engine=server.engine,
            engine_version=await version(client, server.engine),
            model=plan.model.name,
            router_fingerprint=plan.model.router_fingerprint,
        )
        served = await served_model(client, server.engine)
        with only_writer(plan.out):
            stored = stored_samples(plan.out, info, plan.policy_version, plan.prompts)
            wanted = [(p, i) for p in plan.prompts for i in range(plan.n)]
            missing = [(p, i) for p, i in wanted if (p.group, i) not in stored]
            progress.total, progress.before = len(wanted), len(wanted) - len(missing)
            with progress:
                run = _Run(client, server.engine, served, plan, info, progress)
                await run.all(missing, server.concurrency)
    return progress


class _Run:
    """The samples on their way, and the rollouts that wait for their group and their shard.

    Attributes:
        order: of the groups in the plan.
        left: samples of each group that are neither done nor lost.
        parts: rollouts of groups that are not whole.
        ready: those that wait for a shard to be full.
        lost: why samples were given up.
        in_a_row: groups that lost samples since the last rollout.
    """

    def __init__(
        self,
        client: Client,
        engine: str,
        served: str,
        plan: Plan,
        info: StoreInfo,
        progress: Progress,
    ) -> None:
        self.client, self.engine, self.served = client, engine, served
        self.plan, self.info, self.progress = plan, info, progress
        self.decode = decoder(engine)
        self.order = {prompt.group: i for i, prompt in enumerate(plan.prompts)}
        self.left: Counter[int] = Counter()
        self.parts: defaultdict[int, list[Rollout]] = defaultdict(list)
        self.ready: list[Rollout] = []
        self.lost: list[str] = []
        self.in_a_row: set[int] = set()
        # one thread: a reward function need not be safe in several, and may take its time
        self.rewards = ThreadPoolExecutor(1)

    async def all(self, missing: Sequence[tuple[Prompt, int]], concurrency: int) -> None:
        """Sample all of them; whatever happens, groups that are whole are stored."""
        self.left.update(prompt.group for prompt, _ in missing)
        todo = iter(missing)
        workers = [asyncio.ensure_future(self._work(todo)) for _ in range(concurrency)]
        try:
            with cancelled_by_signals(workers) as signals:
                await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
                for worker in workers:
                    worker.cancel()
                results = await asyncio.gather(*workers, return_exceptions=True)
        finally:
            self.rewards.shutdown(wait=False, cancel_futures=True)
            self._store(1)
        self._say_why(results, signals)

    def _say_why(self, results: Sequence[BaseException | None], signals: Sequence[int]) -> None:
        """Raise what ended it early, or what is missing."""
        have = f"{self.plan.out} has {self.progress.before + self.progress.stored}"
        have += f" of {self.progress.total} rollouts"
        for result in results:
            if isinstance(result, _HopelessError):
                raise CollectError(
                    f"{HOPELESS} prompts in a row gave no rollout; {have}; the last: {result}"
                )
            if isinstance(result, Exception):
                raise result
        if signals:
            raise Interrupted(signals[0], f"interrupted; {have}: the same command takes the rest")
        if self.lost:
            raise CollectError(
                f"{have}: the same command tries the {len(self.lost)} others again; "
                f"the first: {self.lost[0]}"
            )

    async def _work(self, todo: Iterator[tuple[Prompt, int]]) -> None:
        for prompt, index in todo:
            rollout = await self._sample(prompt, index)
            self._finish(prompt.group, rollout)
            self.progress.show()

    async def _sample(self, prompt: Prompt, index: int) -> Rollout | None:
        """One rollout; None if it was given up, which is counted and said."""
        plan, where = self.plan, f"{prompt.where}, sample {index}"
        seed = plan.sampling.seed_of(prompt.group, index, plan.policy_version)
        path, body = build_request(self.engine, prompt, plan.sampling, seed, self.served)
        for attempt in range(plan.refused_retries + 1):
            try:
                response = await self.client.post(path, body)
                decoded = self._decode(response, body, where)
                text, reason = answer_of(response, 0, where)
            except NoAnswer as error:
                self._lose(prompt, f"{where}: {error}")
                return None
            except EngineError as error:
                self.progress.refused += 1
                why = str(error).removeprefix(f"{where}: ")
                if attempt == plan.refused_retries:
                    self._lose(prompt, f"{where}: {why} ({attempt + 1} responses refused)")
                continue
            return await self._reward(decoded, prompt, index, text, reason, where)
        return None

    def _decode(self, response: Any, body: dict[str, Any], where: str) -> Sample:
        shape: ModelShape = self.plan.model.shape
        try:
            samples = self.decode(response, body, shape, where)
        except (AttributeError, LookupError, TypeError) as error:  # JSON of some other service
            raise EngineError(f"{where}: the response cannot be read ({error!r})") from error
        if len(samples) != 1:
            raise EngineError(f"{where}: {len(samples)} samples in the response to a request for 1")
        return samples[0]

    async def _reward(
        self, decoded: Sample, prompt: Prompt, index: int, text: str, reason: str, where: str
    ) -> Rollout:
        tokens, length = decoded.tokens_N.tolist(), decoded.prompt_length
        seen = RewardSample(
            prompt.fields, tokens[:length], tokens[length:], text, reason, prompt.group, index
        )
        loop, plan = asyncio.get_running_loop(), self.plan
        reward = await loop.run_in_executor(self.rewards, score, plan.reward, seen, where)
        rollout = to_rollout(decoded, reward, prompt.group, index, plan.policy_version)
        rollout.check(where)
        self.progress.tokens += decoded.response_length
        return rollout

    def _lose(self, prompt: Prompt, why: str) -> None:
        self.lost.append(why)
        self.progress.say(f"not stored: {why}")
        self.in_a_row.add(prompt.group)
        if len(self.in_a_row) >= HOPELESS:
            raise _HopelessError(why)

    def _finish(self, group: int, rollout: Rollout | None) -> None:
        """Take a sample that is done or lost; groups that are whole then go to their shard.

        Advantages are normalised inside a group, so a reader that follows the store needs a group
        in one shard. One that is larger than a shard is stored in parts.
        """
        parts = self.parts[group]
        self.left[group] -= 1
        if rollout is not None:
            self.in_a_row.clear()
            parts.append(rollout)
        if not self.left[group] or len(parts) >= self.plan.shard_size:
            self.ready += parts
            parts.clear()
        self._store(self.plan.shard_size)

    def _store(self, least: int) -> None:
        """Write what is ready if it is so much; not a thread's work, which no cancel ends."""
        if len(self.ready) >= least:
            self.ready.sort(key=lambda r: (self.order[r.group], r.sample))
            write_shard(self.plan.out, self.info, self.ready)
            self.progress.stored += len(self.ready)
            self.ready = []
        self.progress.waiting = len(self.ready) + sum(map(len, self.parts.values()))
