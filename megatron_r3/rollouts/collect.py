"""Collect rollouts: ask a server for every sample of every prompt, and store each exactly once.

What is stored says itself which samples it holds, and a shard appears whole or not at all. So after
a kill the same command reads the store, and asks for the rest.
"""

from __future__ import annotations

import asyncio

from megatron_r3.rollouts.client import Client
from megatron_r3.rollouts.plan import Plan
from megatron_r3.rollouts.policy import EnginePolicy
from megatron_r3.rollouts.progress import Progress
from megatron_r3.rollouts.resume import only_writer, stored_samples
from megatron_r3.rollouts.sampler import Sampler
from megatron_r3.rollouts.server import Server, Watch
from megatron_r3.rollouts.shelf import Shelf
from megatron_r3.rollouts.signals import Interrupted, Stop
from megatron_r3.rollouts.workers import CollectError, work_all

__all__ = ["CollectError", "Interrupted", "Plan", "collect"]


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
