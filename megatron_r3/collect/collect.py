"""Collect rollouts: have an engine sample every prompt, and store each sample exactly once.

The code is the same for every engine. `concurrency` workers take the missing samples in turn. A
worker waits for the engine and the reward (`Sampler`), and hands its rollout to the `Shelf`, which
writes shards. After an error or a signal (SIGKILL excepted) the groups that are whole are
stored too, unless the plan wants all or nothing. The same command then samples what is missing
(resume.py).

Shape suffixes (docs/glossary.md): C, N.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from megatron_r3.collect.engine import Answer, Engine, EnginePolicy, Identity, NoAnswer
from megatron_r3.collect.progress_line import Progress
from megatron_r3.collect.prompt_plan import Plan
from megatron_r3.collect.prompts import Prompt
from megatron_r3.collect.resume import only_writer, stored_samples
from megatron_r3.collect.reward import RewardSample, score
from megatron_r3.collect.signals import BackgroundThread, Interrupted, Stop, end_tasks, noting
from megatron_r3.collect.writing import Shelf
from megatron_r3.data.engines.shape import EngineError
from megatron_r3.data.store import Rollout

# After this many prompts in a row without a rollout a collection ends: the engine is at fault then.
HOPELESS = 8


class CollectError(ValueError):
    """Rollouts are missing; the message says how many and why."""


class _HopelessError(Exception):
    """Too many prompts in a row gave no rollout: stop collecting."""


def collect(
    engine: Engine,
    plan: Plan,
    concurrency: int,
    check: Callable[[Identity], None] | None = None,
    make_sampler: MakeSampler | None = None,
) -> Progress:
    """Sample and store what is missing; returns the counts.

    Args:
        engine: samples the responses; it is closed at the end.
        plan: what to collect.
        concurrency: how many samples are under way at a time, at most.
        check: called with the engine's identity before anything is sampled; raises ValueError to
            refuse the engine. Only a caller that has loaded the weights into the engine gives
            `check`. Without `check`, a store with the same weights under another policy version is
            refused.
        make_sampler: makes the object that samples; None stands for `Sampler`.

    Raises:
        CollectError: rollouts are missing at the end, or many prompts in a row gave none.
        EngineChanged: the engine or its weights changed.
        RewardError: the reward function failed.
        Interrupted: SIGINT, SIGTERM or SIGHUP came.
        ValueError: the engine does not answer or does not take a prompt, or the store does not fit
            the plan, so nothing was sampled; or a shard cannot be written, or `plan.check` refuses
            the shard.
    """
    if make_sampler is None:  # agents make requests of their own, which are checked later
        for prompt in plan.prompts:
            engine.check(prompt)
    return asyncio.run(_collect(engine, plan, concurrency, check, make_sampler or Sampler))


async def _collect(
    engine: Engine,
    plan: Plan,
    concurrency: int,
    check: Callable[[Identity], None] | None,
    make_sampler: MakeSampler,
) -> Progress:
    progress = Progress()
    with noting() as stop:
        try:
            identity = await stop.first(engine.begin(progress.on_retry))
            if check is not None:
                check(identity)
            info = plan.model.store_info(
                engine.name,
                identity.version or "unknown",
                engine_policy=identity.policy,
                sampling=plan.sampling.settings,
            )
            info.check()
            # The lock comes first, so that no other collection adds to the store after it was read.
            with only_writer(plan.out):
                stored = stored_samples(
                    plan.out, info, plan.policy_version, plan.prompts, pushed=check is not None
                )
                wanted = [(prompt, i) for prompt in plan.prompts for i in range(plan.n)]
                missing = [(p, i) for p, i in wanted if (p.group, i) not in stored.samples]
                progress.total, progress.before = len(wanted), len(wanted) - len(missing)
                size = max(1, len(missing)) if plan.all_or_nothing else plan.shard_size
                shelf = Shelf(plan.out, info, plan.prompts, size, plan.check, plan.whole_groups)
                policy = EnginePolicy(shelf, stored.engine_policy)
                async with make_sampler(engine, plan, policy, progress) as sampler:
                    with progress:
                        await _work_all(sampler, shelf, missing, concurrency, stop)
        finally:
            await engine.close()
    return progress


async def _work_all(
    sampler: Sampler,
    shelf: Shelf,
    missing: Sequence[tuple[Prompt, int]],
    concurrency: int,
    stop: Stop,
) -> None:
    """Sample what is missing, and store it. After an error whole groups are stored too, unless the
    plan wants all or nothing.
    """
    shelf.expect(prompt.group for prompt, _ in missing)
    team = _Team(sampler, shelf)
    # All workers take from one iterator, so no sample is taken twice.
    todo = iter(missing)
    number = min(concurrency, len(missing))
    workers = [asyncio.ensure_future(team.work(todo)) for _ in range(number)]
    interrupted: Interrupted | None = None
    try:
        if workers:
            await stop.first(asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION))
    except Interrupted as error:
        interrupted = error
    finally:
        # A worker may miss its cancel (see `end_tasks`): `ending` has it begin no other sample.
        team.ending = True
        await end_tasks(workers)
        shelf.store(shelf.shard_size if sampler.plan.all_or_nothing else 1)
        team.count()
    failures = (worker.exception() for worker in workers if not worker.cancelled())
    team.raise_reason([error for error in failures if error is not None], interrupted)


class GivenUp(Exception):
    """There is no rollout of this sample; the message names the prompt and says why."""


class Sampler:
    """Has the engine answer a plan's prompts, and rewards the responses.

    Args:
        engine: samples the responses.
        plan: what is collected.
        policy: compares the versions of the engine's weights.
        progress: counts refused responses and tokens.
    """

    def __init__(
        self, engine: Engine, plan: Plan, policy: EnginePolicy, progress: Progress
    ) -> None:
        self.plan, self.progress = plan, progress
        self._engine, self._policy = engine, policy
        self._rewards = BackgroundThread("reward")

    async def __aenter__(self) -> Sampler:
        return self

    async def __aexit__(self, *error: object) -> None:
        """End the thread of rewards; a reward that is being computed is not waited for."""
        self._rewards.close()

    async def sample(self, prompt: Prompt, index: int) -> list[Rollout]:
        """Sample one response and reward it; returns a list of its rollout alone.

        Raises:
            GivenUp: there is no response, or none that can be used.
            EngineChanged: the engine or its weights are not those of the start.
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
                    reason = str(error) if str(error).startswith(where) else f"{where}: {error}"
                    raise GivenUp(f"{reason} ({attempt + 1} responses refused)") from error
            else:
                return [await self._reward(answer, prompt, index, where)]
        raise AssertionError("unreachable")

    async def _ask(self, prompt: Prompt, index: int, where: str) -> Answer:
        """Ask for one response, then have the engine confirm that it has not changed."""
        seed = self.plan.sampling.seed_of(prompt.group, index, self.plan.policy_version)
        answer = await self._engine.sample(prompt, seed, where)
        self._policy.check(answer.said.policies, where)
        await self._engine.confirm()
        return answer

    async def _reward(self, answer: Answer, prompt: Prompt, index: int, where: str) -> Rollout:
        plan, decoded = self.plan, answer.decoded
        assert plan.reward is not None, "only an agent rewards by itself"
        seen = RewardSample.of(decoded, prompt.fields, answer.said, prompt.group, index)
        reward = await self._rewards.run(score, plan.reward, seen, where)
        rollout = replace(
            decoded,
            reward=reward,
            group=prompt.group,
            sample=index,
            policy_version=plan.policy_version,
            prompt_digest=prompt.digest,
            versions_C2=None,  # one version of the weights sampled the response (EnginePolicy)
        )
        rollout.check(where)
        self.progress.tokens += int(rollout.response_N.sum())
        return rollout


MakeSampler = Callable[[Engine, Plan, EnginePolicy, Progress], Sampler]


class _Team:
    """The state that the workers share.

    Attributes:
        ending: a worker begins no new sample once this is True.
        lost: for each sample that was given up, the reason.
        in_a_row: the groups that lost samples since the last rollout came.
    """

    def __init__(self, sampler: Sampler, shelf: Shelf) -> None:
        self.sampler, self.shelf, self.ending = sampler, shelf, False
        self.lost: list[str] = []
        self.in_a_row: set[int] = set()

    async def work(self, todo: Iterator[tuple[Prompt, int]]) -> None:
        """Take one sample after the other, until there is none left or the collection ends."""
        for prompt, index in todo:
            rollouts, reason = list[Rollout](), ""
            try:
                rollouts = await self.sampler.sample(prompt, index)
            except GivenUp as error:
                reason = str(error)
            self.shelf.take(prompt.group, rollouts)
            if not rollouts:
                # `_lose` is not called inside the `except`: an error raised there would keep the
                # GivenUp and its frames in memory, and with these a whole response.
                self._lose(prompt.group, reason)
            else:
                self.in_a_row.clear()
            self.count()
            if self.ending:
                return

    def count(self) -> None:
        """Copy the shelf's counts to the progress bar."""
        progress = self.sampler.progress
        progress.stored, progress.waiting = self.shelf.stored, self.shelf.waiting
        progress.show()

    def _lose(self, group: int, reason: str) -> None:
        self.lost.append(reason)
        self.sampler.progress.say(f"not stored: {reason}")
        self.in_a_row.add(group)
        if len(self.in_a_row) >= HOPELESS:
            raise _HopelessError(reason)

    def raise_reason(
        self, failures: Sequence[BaseException], interrupted: Interrupted | None
    ) -> None:
        """Raise an error with the reason why rollouts are missing; return if none are."""
        progress = self.sampler.progress
        have = f"{self.shelf.out} has {progress.before + progress.stored}"
        have += f" of {progress.total} rollouts"
        for error in failures:
            if isinstance(error, _HopelessError):
                raise CollectError(
                    f"{HOPELESS} prompts in a row gave no rollout; {have}; the last "
                    f"failure: {error}"
                )
            raise error
        if interrupted is not None:
            raise Interrupted(
                interrupted.number, f"interrupted; {have}: run the same command again for the rest"
            )
        if self.lost:
            raise CollectError(
                f"{have}: samples given up: {len(self.lost)}; the same command tries them again; "
                f"the first failure: {self.lost[0]}"
            )
