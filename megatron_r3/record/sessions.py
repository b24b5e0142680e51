"""The sessions of agents: the engine answers their requests, and a reward ends them.

Shape suffixes (docs/glossary.md): N.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from megatron_r3.collect.engine import EngineChanged, EnginePolicy
from megatron_r3.collect.prompts import Prompt
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


class NoSession(ValueError):
    """There is no such session."""


class Busy(ValueError):
    """No further session may be open, or a request of the session is under way."""


@dataclass
class Open:
    """A session that is not rewarded yet.

    Attributes:
        where: the session's name in messages.
        seed: the seeds of its responses are made from this one; None leaves them to the client.
        session: its turns.
        used: when its last request began or ended, by the monotonic clock.
        at_work: how many of its requests are under way.
        asked: how many requests it had.
        first: the number and the prompt's ids of the earliest request that was answered.
        ending: the task that stores the session; None before the session is rewarded.
    """

    where: str
    seed: int | None = None
    session: Session = field(default_factory=Session)
    used: float = field(default_factory=time.monotonic)
    at_work: int = 0
    asked: int = 0
    first: tuple[int, list[int]] | None = None
    ending: asyncio.Task[list[float]] | None = None

    def __str__(self) -> str:
        return f"{self.where} ({len(self.session.turns)} responses)"


class Sessions:
    """Answers the requests of open sessions, and makes rollouts of them.

    Args:
        engine: samples the responses; it has begun.
        policy: compares the versions of the engine's weights.
        template: makes ids of messages.
        vocab_size: of the engine's model; None if it is not known.
        reward: rewards a rollout of a session that is ended without a reward; None if each session
            must get one.
        all_turns: as in `Session.rollouts`.

    Attributes:
        open: the open sessions.
        failed: holds an error after which no response may be recorded.
    """

    def __init__(
        self,
        engine: Server,
        policy: EnginePolicy,
        template: ChatTemplate,
        vocab_size: int | None,
        reward: RewardFunction | None,
        all_turns: bool = False,
    ) -> None:
        self._engine, self._policy, self._template = engine, policy, template
        self._vocab_size, self._reward, self._all_turns = vocab_size, reward, all_turns
        self._rewards = BackgroundThread("reward")
        self.open: dict[str, Open] = {}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """Have the reward thread end after the reward that it computes now."""
        self._rewards.close()
        _ = self.failed.cancel() or self.failed.exception()  # else asyncio prints that error

    def admit(self, name: str) -> Open:
        """The open session of that name, which a request is for.

        Raises:
            NoSession: there is none.
        """
        if name not in self.open:
            raise NoSession(
                "no such session is open: it has had no response, it was stored or dropped "
                "already, or the recorder was started again since"
            )
        return self.open[name]

    async def answer(self, name: str, question: Question) -> tuple[list[Turn], int]:
        """Have the engine answer a request of a session.

        Returns:
            A turn for each response, and the number of ids of the prompt.

        Raises:
            NoSession, Busy: no request of this session can be answered now.
            EngineError: the engine refused, or its response cannot be used.
            EngineChanged: the engine or its weights are not those of the start.
            ValueError: the chat template refuses the messages.
        """
        one = self.admit(name)
        if one.ending is not None:
            raise Busy(f"{one} is being rewarded: no further request can be a part of it")
        one.used, one.at_work, one.asked = time.monotonic(), one.at_work + 1, one.asked + 1
        number = one.asked
        try:
            before, new, ids = self._prompt(one.session, question)
            seed = question.seed
            if seed is None and one.seed is not None:
                seed = digest_number(f"{one.seed} {number}".encode(), 31)
            increments = await asyncio.gather(
                *(self._ask(one, question, ids, before, seed, i) for i in range(question.count))
            )
            turns = [self._turn(increment, before, new, question) for increment in increments]
            for turn in turns:
                one.session.add(turn, question.asked, question.digests, bool(question.stop))
            one.first = min(one.first or (number, ids), (number, ids))
            return turns, len(ids)
        finally:
            one.used, one.at_work = time.monotonic(), one.at_work - 1

    def _prompt(self, session: Session, question: Question) -> tuple[Turn | None, Asked, list[int]]:
        """The turn that is continued, what is new, and the ids of the whole prompt."""
        asked, settings = question.asked, question.settings
        if question.tools:
            self._template.check_tools(question.tools)
        before, new = session.find(asked, question.digests)
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
        self,
        one: Open,
        question: Question,
        ids: list[int],
        before: Turn | None,
        seed: int | None,
        number: int,
    ) -> Increment:
        where = f"{one}, response {number}"
        prompt = Prompt(where, 0, ids, {})
        prompt.check_vocabulary(self._vocab_size)
        if seed is not None and number:  # the choices of one request must differ
            seed = digest_number(f"{seed} {number}".encode(), 31)
        # The row of the last id that was sampled comes with the next response (conversation.py).
        start = 0 if before is None else len(before.increment.tokens_N) - 1
        increment = await self._engine.ask(
            *(prompt, seed, where, start), question.stop, question.max_tokens
        )
        try:
            self._policy.check(increment.said.policies, where)
            await self._engine.confirm()
        except EngineChanged as error:
            if not self.failed.done():
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

    async def rewarded(
        self, one: Open, reward: Any = None, line: Mapping[str, Any] = MappingProxyType({})
    ) -> list[Rollout]:
        """The rollouts of a session, with their rewards; group, sample and version are not set.

        Args:
            reward: the reward of each rollout, a number; or a list with a number for each turn;
                None has the reward function reward each rollout.
            line: the prompt's line, which the reward function gets among its fields.

        Raises:
            ValueError: the reward is no number, there is none, or the reward function failed; a
                list does not fit the turns; or the responses of a branch contradict each other.
        """
        where, session = str(one), one.session
        if isinstance(reward, list):
            rollouts = session.rollouts_by_turn(where)
            if len(reward) != len(rollouts):
                raise ValueError(
                    f"{where}: {len(reward)} rewards for {len(rollouts)} turns; give one reward "
                    "for each turn, or one for all"
                )
            rewards = [checked_reward(value, f"{where}: the reward is") for value in reward]
        else:
            rollouts = session.rollouts(where, self._all_turns)
            rewards = await self._rewards_of(session, rollouts, reward, line, where)
        return [replace(one, reward=value) for one, value in zip(rollouts, rewards, strict=True)]

    async def _rewards_of(
        self,
        session: Session,
        rollouts: list[Rollout],
        reward: Any,
        line: Mapping[str, Any],
        where: str,
    ) -> list[float]:
        if reward is not None:
            return [checked_reward(reward, f"{where}: the reward is")] * len(rollouts)
        if self._reward is None:
            raise ValueError(f"{where}: no reward: give a number, or the option --reward")
        rewards: list[float] = []
        for branch, rollout in zip(session.branches(), rollouts, strict=True):
            last = branch[-1]
            said = Said(last.message, last.finish_reason)
            fields = {**line, **_fields(branch)}
            sample = RewardSample.of(rollout, fields, said, 0, len(rewards))
            rewards.append(await self._rewards.run(score, self._reward, sample, where))
        return rewards


def _fields(branch: list[Turn]) -> Mapping[str, Any]:
    """What a reward function gets as the fields of a branch: all that was asked and answered."""
    messages: list[Any] = []
    for turn in branch:
        messages += turn.asked if isinstance(turn.asked, list) else [turn.asked]
        messages.append(turn.message)
    return {"messages": messages, "finish_reasons": [turn.finish_reason for turn in branch]}
