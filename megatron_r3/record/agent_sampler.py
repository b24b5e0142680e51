"""Runs an agent for each sample of a collection, and stores the agent's session as its rollouts.

An agent is an async function `(client, prompt) -> reward`. `client` is an AsyncOpenAI with a base
URL for the session of this sample. This process serves that URL, so other libraries of the agent
may call it too. `prompt` is the prompt's whole line. The reward is a number, or a list with a
number for each turn; None has the reward function reward the session.

Shape suffixes (docs/glossary.md): N.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_r3.collect.collect import GivenUp, Sampler
from megatron_r3.collect.engine import Engine, EnginePolicy
from megatron_r3.collect.progress_line import Progress
from megatron_r3.collect.prompt_plan import Plan
from megatron_r3.collect.prompts import Prompt
from megatron_r3.collect.server import Server
from megatron_r3.collect.signals import end_tasks
from megatron_r3.data.engines.shape import EngineError
from megatron_r3.data.rollout import Rollout
from megatron_r3.record.chat_template import ChatTemplate
from megatron_r3.record.record_server import make_app, open_port, serve_app
from megatron_r3.record.sessions import Open, Sessions
from megatron_r3.replay.words import one_line

try:
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient
except ImportError as missing:  # an optional dependency
    raise ValueError(
        f"running agents needs openai: pip install 'megatron-r3[record]' ({missing})"
    ) from missing

Agent = Callable[[AsyncOpenAI, Mapping[str, Any]], Awaitable[Any]]
# The first branch of a session has the number of its sample. Branch b has b * 2^20 more, so that no
# number is given twice: a collection has fewer than 2^20 samples of a prompt.
_BRANCH = 1 << 20


class AgentSampler(Sampler):
    """Samples by an agent (`collect.Sampler`).

    Args:
        engine, plan, policy, progress: as in `Sampler`; the engine is a server.
        agent: the agent.
        template: makes ids of messages.
        one_rollout: refuse sessions with several branches, or with a reward for each turn.
        leave: called when an agent has ended.
        idle_s: an agent that sends no request for so many seconds is cancelled.
    """

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        policy: EnginePolicy,
        progress: Progress,
        agent: Agent,
        template: ChatTemplate,
        one_rollout: bool = False,
        leave: Callable[[], None] = lambda: None,
        idle_s: float = 3600.0,
    ) -> None:
        super().__init__(engine, plan, policy, progress)
        self._agent, self._one_rollout, self._leave = agent, one_rollout, leave
        self._template, self._idle_s = template, idle_s

    async def __aenter__(self) -> AgentSampler:
        """Start the server that answers the agents."""
        engine, plan = self._engine, self.plan
        assert isinstance(engine, Server), "an engine without a server answers no agent"
        self._sessions = Sessions(
            engine, self._policy, self._template, plan.model.vocab_size, plan.reward
        )
        listening = open_port("127.0.0.1", 0)
        self._url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1/sessions"
        app = make_app(self._sessions, plan.sampling, engine.dialect, plan.model.name)
        self._serving = asyncio.ensure_future(serve_app(self._sessions, app, listening))
        return self

    async def __aexit__(self, *error: object) -> None:
        """End the server."""
        await end_tasks([self._serving])
        self._sessions.close()
        await super().__aexit__(*error)

    async def sample(self, prompt: Prompt, index: int) -> list[Rollout]:
        """Run the agent once; returns a rollout for each branch of its session.

        Raises:
            GivenUp: the agent raised an error or was cancelled, or its session makes no rollout.
            EngineChanged: the engine or its weights are not those of the start.
            ValueError: the reward is no number, or the reward function failed; or with
                `one_rollout` the session made several rollouts.
        """
        plan, where = self.plan, f"{prompt.where}, sample {index}"
        seed = plan.sampling.seed_of(prompt.group, index, plan.policy_version)
        name, one = secrets.token_urlsafe(18), Open(where, seed)
        self._sessions.open[f"id:{name}"] = one
        # A client of its own, because httpx looks at all connections of a client in each request.
        http = DefaultAsyncHttpxClient(timeout=None, trust_env=False, verify=False)
        client = AsyncOpenAI(
            base_url=f"{self._url}/{name}",
            api_key="none",
            http_client=http,
            max_retries=plan.refused_retries,
        )
        # A task of its own: if the agent cancels itself, that must not end the worker silently.
        running = asyncio.ensure_future(self._run(client, prompt, where))
        try:
            await self._wait_for(running, one)
            is_idle = not running.done()
        finally:
            await end_tasks({running})
            await http.aclose()
            del self._sessions.open[f"id:{name}"]
            self._leave()
        if is_idle:
            raise GivenUp(f"{where}: the agent sent no request for {self._idle_s:g} s")
        if running.cancelled():
            raise GivenUp(f"{where}: the agent cancelled itself")
        reward = running.result()
        if not one.session.turns:
            raise GivenUp(f"{where}: the agent asked for no response")
        try:
            rollouts = await self._sessions.rewarded(one, reward, prompt.fields)
        except EngineError as error:
            raise GivenUp(f"{where}: {error}") from error
        if self._one_rollout and len(rollouts) > 1:
            raise ValueError(
                f"{where}: its session made {len(rollouts)} rollouts, and a collection of a run "
                "has one for each sample: have the agent send its history as it was, with what is "
                "new at the end, and return one reward"
            )
        rollouts = [
            replace(
                rollout,
                group=prompt.group,
                sample=index + branch * _BRANCH,
                policy_version=plan.policy_version,
                prompt_digest=prompt.digest,
            )
            for branch, rollout in enumerate(rollouts)
        ]
        for rollout in rollouts:
            rollout.check(where)
            self.progress.tokens += int(rollout.response_N.sum())
        return rollouts

    async def _wait_for(self, running: asyncio.Future[Any], one: Open) -> None:
        """Return once the agent has ended, or has sent no request for `idle_s`."""
        while not running.done():
            left = one.used + self._idle_s - time.monotonic()
            if left <= 0 and not one.at_work:
                return
            await asyncio.wait({running}, timeout=max(left, 1.0))

    async def _run(self, client: AsyncOpenAI, prompt: Prompt, where: str) -> Any:
        try:
            return await self._agent(client, prompt.fields)
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit too, which would end this process with no error
            reason = one_line(f"{type(error).__name__}: {error}", 500)
            raise GivenUp(f"{where}: the agent raised {reason}") from error
        finally:
            if self._sessions.failed.done():
                self._sessions.failed.result()  # raises EngineChanged


def sampler_of(agent: Agent, template: ChatTemplate, **more: Any) -> Callable[..., AgentSampler]:
    """What makes the sampler of a collection; `more` are other arguments of AgentSampler.

    Raises:
        ValueError: the agent is no async function.
    """
    if not any(map(inspect.iscoroutinefunction, (agent, type(agent).__call__))):
        raise ValueError(
            f"the agent {agent!r} is no async function: write `async def solve(client, prompt)`"
        )
    return partial(AgentSampler, agent=agent, template=template, **more)
