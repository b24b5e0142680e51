"""Collect rollouts: ask a server for every sample of every prompt, and store each exactly once.

What is stored says itself which samples it holds, and a shard appears whole or not at all. So after
a kill the same command reads the store, and asks for the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from megatron_r3.rollouts.client import Client
from megatron_r3.rollouts.progress import Progress
from megatron_r3.rollouts.prompts import Prompt
from megatron_r3.rollouts.resume import only_writer, stored_samples
from megatron_r3.rollouts.sampler import GivenUp, Plan, Sampler
from megatron_r3.rollouts.server import EnginePolicy, Server, Watch
from megatron_r3.rollouts.shelf import Shelf
from megatron_r3.rollouts.signals import Interrupted, Stop, end_tasks


def collect(server: Server, plan: Plan) -> Progress:
    """Sample and store what is missing; returns the counts.

    Raises:
        CollectError: rollouts are missing at the end, or the server answers no prompt.
        ServerChanged: it became another one; groups that were whole before are stored.
        RewardError: the reward function failed; groups that were whole before are stored.
        Interrupted: SIGINT, SIGTERM or SIGHUP came; groups that were whole before are stored.
        ValueError: server, store and plan do not belong together; nothing was sampled.
    """
    plan.check(server.engine)
    return asyncio.run(_collect(server, plan))


async def _collect(server: Server, plan: Plan) -> Progress:
    progress = Progress()

    def on_retry() -> None:
        progress.retries += 1
        progress.show()

    client = Client(
        server.url, server.concurrency, server.timeout, server.retries, server.pause, on_retry
    )
    with Stop() as stop:
        async with client:
            watch = Watch(client, server.engine)
            info = plan.store_info(server.engine, await stop.first(watch.begin()))
            info.check()
            with only_writer(plan.out):
                stored = stored_samples(plan.out, info, plan.policy_version, plan.prompts)
                wanted = [(p, i) for p in plan.prompts for i in range(plan.n)]
                missing = [(p, i) for p, i in wanted if (p.group, i) not in stored.samples]
                progress.total, progress.before = len(wanted), len(wanted) - len(missing)
                shelf = Shelf(plan.out, info, plan.prompts, plan.shard_size)
                policy = EnginePolicy(shelf, stored.engine_policy)
                sampler = Sampler(client, server.engine, plan, watch, policy, progress)
                with progress:
                    await work_all(sampler, shelf, missing, server.concurrency, stop)
    return progress


# All missing samples, so many at a time, and what is stored and said however it ends.

HOPELESS = 8  # so many prompts in a row without a rollout: it is the server, not the prompt


class CollectError(ValueError):
    """Rollouts are missing; the message says how many and why."""


class _HopelessError(Exception):
    """No more of this."""


async def work_all(
    sampler: Sampler,
    shelf: Shelf,
    missing: Sequence[tuple[Prompt, int]],
    concurrency: int,
    stop: Stop,
) -> None:
    """Sample all that is missing; whatever happens, groups that are whole are stored.

    Raises:
        CollectError: samples were given up.
        Interrupted: a signal came.
        ValueError: that of a reward, a store, or a server that changed.
    """
    shelf.expect(prompt.group for prompt, _ in missing)
    team = _Team(sampler, shelf)
    todo = iter(missing)
    number = min(concurrency, len(missing))
    workers = [asyncio.ensure_future(team.work(todo)) for _ in range(number)]
    interrupted: Interrupted | None = None
    try:
        if workers:
            await stop.first(asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION))
    except Interrupted as signal:
        interrupted = signal
    finally:
        # a worker that misses its cancel looks at this before it takes the next sample
        team.ending = True
        await end_tasks(workers)
        sampler.close()
        shelf.store()
        team.count()
    failed = (worker.exception() for worker in workers if not worker.cancelled())
    team.say_why([error for error in failed if error is not None], interrupted)


class _Team:
    """What the workers share.

    Attributes:
        ending: no new sample is begun.
        lost: why samples were given up.
        in_a_row: groups that lost samples since the last rollout.
    """

    def __init__(self, sampler: Sampler, shelf: Shelf) -> None:
        self.sampler, self.shelf, self.ending = sampler, shelf, False
        self.lost: list[str] = []
        self.in_a_row: set[int] = set()

    async def work(self, todo: Iterator[tuple[Prompt, int]]) -> None:
        """Take the next sample, until there is none or it ends."""
        for prompt, index in todo:
            rollout, why = None, ""
            try:
                rollout = await self.sampler.sample(prompt, index)
            except GivenUp as error:
                why = str(error)
            self.shelf.take(prompt.group, rollout)
            if rollout is None:
                # not where the error was caught: what is raised there keeps it, its frames, and
                # with them a whole response
                self._lose(prompt.group, why)
            else:
                self.in_a_row.clear()
            self.count()
            if self.ending:
                return

    def count(self) -> None:
        """Bring the counts up to date."""
        progress = self.sampler.progress
        progress.stored, progress.waiting = self.shelf.stored, self.shelf.waiting
        progress.show()

    def _lose(self, group: int, why: str) -> None:
        self.lost.append(why)
        self.sampler.progress.say(f"not stored: {why}")
        self.in_a_row.add(group)
        if len(self.in_a_row) >= HOPELESS:
            raise _HopelessError(why)

    def say_why(self, failed: Sequence[BaseException], interrupted: Interrupted | None) -> None:
        """Raise what ended it early, or what is missing."""
        progress = self.sampler.progress
        have = f"{self.shelf.out} has {progress.before + progress.stored}"
        have += f" of {progress.total} rollouts"
        for error in failed:
            if isinstance(error, _HopelessError):
                raise CollectError(
                    f"{HOPELESS} prompts in a row gave no rollout; {have}; the last: {error}"
                )
            raise error
        if interrupted is not None:
            raise Interrupted(
                interrupted.number, f"interrupted; {have}: the same command takes the rest"
            )
        if self.lost:
            raise CollectError(
                f"{have}: the same command tries the {len(self.lost)} others again; "
                f"the first: {self.lost[0]}"
            )
