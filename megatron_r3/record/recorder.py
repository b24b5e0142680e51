"""Keeps the sessions of agents, asks the engine for their responses, and ends what was rewarded.

An agent may answer for hours, so a session ends when somebody rewards it. Its rollouts are in the
store (session_shards.py) before the request with the reward is answered.

Shape suffixes (docs/glossary.md): N.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from megatron_r3.collect.engine import EngineChanged
from megatron_r3.collect.prompt_plan import Model, Sampling
from megatron_r3.collect.prompts import Prompt
from megatron_r3.collect.resume import only_writer
from megatron_r3.collect.reward import RewardFunction, RewardSample, checked_reward, score
from megatron_r3.collect.server import Server
from megatron_r3.collect.signals import BackgroundThread
from megatron_r3.data.digest import digest_number
from megatron_r3.data.engines.conversation import Increment
from megatron_r3.data.engines.said import Said
from megatron_r3.data.rollout import Rollout
from megatron_r3.record.branches import Asked, Session, Turn
from megatron_r3.record.chat_template import ChatTemplate
from megatron_r3.record.openai_form import Question
from megatron_r3.record.session_shards import SessionShards
from megatron_r3.replay.words import one_line

_LOOK_S = 1.0  # how often idle sessions are looked for


class NoSession(ValueError):
    """There is no such session."""


class Busy(ValueError):
    """The recorder has as many sessions as it may have, or the session is at work."""


@dataclass
class _Open:
    """A session that is not rewarded yet.

    Attributes:
        session: its turns.
        used: when its last request began or ended, by the monotonic clock.
        at_work: how many of its requests are under way.
        asked: how many requests it had.
        first: the number and the ids of the earliest request that was answered.
        ending: stores the session; None before it is rewarded.
    """

    session: Session = field(default_factory=Session)
    used: float = field(default_factory=time.monotonic)
    at_work: int = 0
    asked: int = 0
    first: tuple[int, list[int]] | None = None
    ending: asyncio.Task[list[float]] | None = None


class Recorder:
    """Answers the requests of agents, and stores their sessions.

    Args:
        engine: samples the responses.
        template: makes ids of messages.
        model: the model that the engine runs.
        sampling: how each response is sampled.
        out: the directory of the store.
        policy_version: which policy samples.
        reward: rewards a session that is ended without a reward; None if each session must get one.
        most_sessions: how many sessions may be open at a time.
        idle_s: a session without a request for so many seconds ends: it is rewarded by `reward`, or
            named and dropped if there is none.
        all_turns: as in `Session.rollouts`.
        say: prints a line about a session.

    Attributes:
        failed: holds an error after which no response may be recorded.
    """

    def __init__(
        self,
        engine: Server,
        template: ChatTemplate,
        model: Model,
        sampling: Sampling,
        out: Path,
        policy_version: int,
        reward: RewardFunction | None,
        most_sessions: int,
        idle_s: float,
        all_turns: bool,
        say: Callable[[str], None],
    ) -> None:
        self._engine, self._template, self._model = engine, template, model
        self._sampling, self._out, self._policy_version = sampling, out, policy_version
        self._reward, self._most, self._idle_s = reward, most_sessions, idle_s
        self._all_turns, self._say = all_turns, say
        self._open: dict[str, _Open] = {}
        self._shards: SessionShards | None = None
        self._rewards = BackgroundThread("reward")
        self.failed: asyncio.Future[None] | None = None

    @property
    def stored(self) -> int:
        """How many rollouts were written."""
        return 0 if self._shards is None else self._shards.stored

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Record while the block runs; at the end the sessions that are left are named.

        Raises:
            ValueError: engine, store and options do not fit together, or the engine does not
                answer.
        """
        self.failed = asyncio.get_running_loop().create_future()
        identity = await self._engine.begin(lambda: None)
        info = self._model.store_info(
            self._engine.name,
            identity.version or "unknown",
            engine_policy=identity.policy,
            sampling=self._sampling.settings,
        )
        info.check()
        try:
            with only_writer(self._out):
                self._shards = SessionShards(self._out, info, self._policy_version)
                watch = asyncio.ensure_future(self._end_idle_sessions())
                try:
                    yield
                finally:
                    watch.cancel()
                    endings = [one.ending for one in self._open.values() if one.ending is not None]
                    await asyncio.gather(*endings, return_exceptions=True)
                    for name in list(self._open):
                        self._say(f"not stored: {self._shown(name)}: it has no reward")
        finally:
            self._rewards.close()
            await self._engine.close()

    async def answer(self, name: str, question: Question) -> tuple[list[Turn], int]:
        """Have the engine answer a request of a session.

        Returns:
            A turn for each response, and the number of ids of the prompt.

        Raises:
            Busy: there are too many sessions.
            EngineError: the engine refused, or its response cannot be used.
            EngineChanged: the engine or its weights are not those of the start.
            ValueError: the chat template refuses the messages.
        """
        if name not in self._open and len(self._open) >= self._most:
            raise Busy(f"{len(self._open)} sessions are open: reward or discard one of them first")
        one = self._open.setdefault(name, _Open())
        if one.ending is not None:
            raise Busy(
                f"{self._shown(name)} is being rewarded: no further request can be a part of it"
            )
        one.used, one.at_work, one.asked = time.monotonic(), one.at_work + 1, one.asked + 1
        number = one.asked
        try:
            before, new, ids = self._prompt(one.session, question)
            increments = await asyncio.gather(
                *(self._ask(name, question, ids, before, i) for i in range(question.count))
            )
            turns = [self._turn(increment, before, new, question) for increment in increments]
            for turn in turns:
                one.session.add(turn, question.asked, question.settings, bool(question.stop))
            one.first = min(one.first or (number, ids), (number, ids))
            return turns, len(ids)
        finally:
            one.used, one.at_work = time.monotonic(), one.at_work - 1
            if not one.session.turns and not one.at_work and self._open.get(name) is one:
                del self._open[name]  # nothing was sampled: there is nothing to reward

    def _prompt(self, session: Session, question: Question) -> tuple[Turn | None, Asked, list[int]]:
        """The turn that is continued, what is new, and the ids of the whole prompt."""
        asked, settings = question.asked, question.settings
        if question.tools:
            self._template.check_tools(question.tools)
        before, new = session.find(asked, settings)
        if before is not None:
            ids = before.increment.tokens_N.tolist()
            added: list[int] | None
            if question.is_chat:
                added = self._template.new_part(asked, len(new), settings, ids[-1])  # type: ignore[arg-type]
            else:
                is_text = isinstance(new, str)
                added = self._template.ids_after(ids[-1], new) if is_text else [*new]  # type: ignore[arg-type,list-item]
            if added is not None:
                return before, new, ids + added
        if question.is_chat:
            return None, asked, self._template.whole(asked, settings)  # type: ignore[arg-type]
        if isinstance(asked, str):
            return None, asked, self._template.ids_of(asked, question.special)
        return None, asked, [*asked]  # type: ignore[list-item]

    async def _ask(
        self, name: str, question: Question, ids: list[int], before: Turn | None, number: int
    ) -> Increment:
        where = f"{self._shown(name)}, response {number}"
        prompt = Prompt(where, 0, ids, {})
        prompt.check_vocabulary(self._model.vocab_size)
        seed = question.seed
        if seed is not None and number:  # the choices of one request must differ
            seed = digest_number(f"{seed} {number}".encode(), 31)
        # The row of the last id that was sampled comes with the next response (conversation.py).
        start = 0 if before is None else len(before.increment.tokens_N) - 1
        increment = await self._engine.ask(
            *(prompt, seed, where, start), question.stop, question.max_tokens
        )
        assert self._shards is not None, "the recorder must be running"
        try:
            self._shards.policy.check(increment.said.policies, where)
            await self._engine.confirm()
        except EngineChanged as error:
            if self.failed is not None and not self.failed.done():
                self.failed.set_exception(error)
            raise
        return increment

    def _turn(
        self, increment: Increment, before: Turn | None, new: Asked, question: Question
    ) -> Turn:
        said = increment.said
        text = said.message.get("content")
        if text is None:  # a server without a tokenizer
            text = self._template.text_of(increment.tokens_N[increment.prompt_length :].tolist())
            for stop in question.stop:  # a client does not expect the text at which it ended
                text = text.partition(stop)[0]
        message = self._template.message(text, question.tools)
        return Turn(before, replace(increment, said=Said()), new, message, said.finish_reason)

    async def end(self, name: str, reward: Any = None) -> tuple[int, list[float]]:
        """Store a session's rollouts, and forget the session.

        A client that does not wait for the answer changes nothing; its second request, if it comes
        before the first one has ended, gets the answer of the first one.

        Args:
            reward: the reward of each rollout, a number; or a list with a number for each turn;
                None has the reward function reward each rollout.

        Returns:
            How many responses the session had, and the reward of each rollout that was stored.

        Raises:
            NoSession: there is no such session, or it was stored already.
            Busy: a request of the session is under way.
            ValueError: the reward is no number, or the reward function failed; the session stays.
            StoreError: the store cannot be written; the session stays.
        """
        one = self._get(name)
        if one.ending is None:
            self._refuse_at_work(name, one)
            one.ending = asyncio.ensure_future(self._end(name, one, reward))
            # a client may have gone away: then nobody else asks for the task's error
            one.ending.add_done_callback(lambda task: task.cancelled() or task.exception())
        return len(one.session.turns), await asyncio.shield(one.ending)

    async def _end(self, name: str, one: _Open, reward: Any) -> list[float]:
        where = self._shown(name)
        try:
            if isinstance(reward, list):
                rollouts = one.session.rollouts_by_turn(where)
                if len(reward) != len(rollouts):
                    raise ValueError(
                        f"{where}: {len(reward)} rewards for {len(rollouts)} turns; give one "
                        "reward for each turn, or one for all"
                    )
                rewards = [checked_reward(value, f"{where}: the reward is") for value in reward]
            else:
                rollouts = one.session.rollouts(where, self._all_turns)
                rewards = await self._rewards_of(one.session, rollouts, reward, where)
            assert one.first is not None, "a session without an answer is forgotten"
            assert self._shards is not None, "the recorder must be running"
            await self._shards.store(rollouts, rewards, one.first[1])
        except BaseException:
            one.ending = None  # the session stays, and can be rewarded again
            raise
        if self._open.get(name) is one:
            del self._open[name]
        return rewards

    def _refuse_at_work(self, name: str, one: _Open) -> None:
        if one.at_work:
            raise Busy(f"{self._shown(name)}: {one.at_work} of its requests are under way")

    async def _rewards_of(
        self, session: Session, rollouts: list[Rollout], reward: Any, where: str
    ) -> list[float]:
        if reward is not None:
            return [checked_reward(reward, f"{where}: the reward is")] * len(rollouts)
        if self._reward is None:
            raise ValueError(
                f'{where}: no reward: send {{"reward": 1.0}}, or start the recorder with --reward'
            )
        rewards: list[float] = []
        for branch, rollout in zip(session.branches(), rollouts, strict=True):
            last = branch[-1]
            said = Said(last.message, last.finish_reason)
            sample = RewardSample.of(rollout, _fields(branch), said, 0, len(rewards))
            rewards.append(await self._rewards.run(score, self._reward, sample, where))
        return rewards

    def discard(self, name: str) -> None:
        """Forget a session.

        Raises:
            NoSession: there is no such session.
            Busy: a request of the session is under way, or it is being rewarded.
        """
        one = self._get(name)
        self._refuse_at_work(name, one)
        if one.ending is not None:
            raise Busy(f"{self._shown(name)} is being rewarded")
        del self._open[name]

    def _get(self, name: str) -> _Open:
        if name not in self._open:
            raise NoSession(
                f"{self._shown(name)}: no such session is open: it has had no response, it was "
                "stored or dropped already, or the recorder was started again since"
            )
        return self._open[name]

    async def _end_idle_sessions(self) -> None:
        while True:
            await asyncio.sleep(min(_LOOK_S, self._idle_s))
            for name, one in list(self._open.items()):
                # a reward function may take its time: meanwhile other sessions have gone on
                is_gone = self._open.get(name) is not one or one.ending is not None
                if is_gone or one.at_work or time.monotonic() - one.used < self._idle_s:
                    continue
                where = self._shown(name)
                reason = f"it got neither a request nor a reward for {self._idle_s:g} s"
                if self._reward is not None:
                    try:
                        await self.end(name)
                        continue
                    except Exception as error:
                        reason = str(error)
                if self._open.get(name) is one:
                    del self._open[name]
                self._say(one_line(f"not stored: {where}: {reason}", 500))

    def _shown(self, name: str) -> str:
        """A session's name in messages: an API key is shown as a digest."""
        kind, _, text = name.partition(":")
        if kind == "key":
            text = f"of the key with the digest {sha256(text.encode()).hexdigest()[:8]}"
        one = self._open.get(name)
        turns = f" ({len(one.session.turns)} responses)" if one else ""
        return one_line(f"session {text}{turns}", 200)


def _fields(branch: list[Turn]) -> Mapping[str, Any]:
    """What a reward function gets as the fields of a branch: all that was asked and answered."""
    messages: list[Any] = []
    for turn in branch:
        messages += turn.asked if isinstance(turn.asked, list) else [turn.asked]
        messages.append(turn.message)
    return {"messages": messages, "finish_reasons": [turn.finish_reason for turn in branch]}
