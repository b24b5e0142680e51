"""Records the sessions of clients in other processes, and ends each session when it is rewarded.

An agent may work for hours, so a session ends only when a client sends its reward. The session's
rollouts are in the store (session_shards.py) before the request with the reward is answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from megatron_r3.collect.prompt_plan import Model, Sampling
from megatron_r3.collect.resume import only_writer
from megatron_r3.collect.server import Server
from megatron_r3.record.branches import Turn
from megatron_r3.record.openai_form import Question
from megatron_r3.record.session_shards import SessionShards
from megatron_r3.record.sessions import Busy, NoSession, Open, Sessions
from megatron_r3.replay.words import one_line

_LOOK_S = 1.0  # how often idle sessions are looked for


@asynccontextmanager
async def recording(
    engine: Server,
    model: Model,
    sampling: Sampling,
    out: Path,
    policy_version: int,
    most_sessions: int,
    idle_s: float,
    say: Callable[[str], None],
    **of_sessions: Any,
) -> AsyncIterator[Recorder]:
    """Record while the block runs; at its end print a line for each session without a reward.

    Args:
        engine: samples the responses; it is closed at the end.
        model: the model that the engine runs.
        sampling: how each response is sampled.
        out: the directory of the store.
        policy_version: which policy samples.
        most_sessions, idle_s, say: as in `Recorder`.
        of_sessions: other arguments of `Sessions`.

    Raises:
        ValueError: engine, store and options do not fit together, or the engine does not answer.
    """
    try:
        identity = await engine.begin(lambda: None)
        info = model.store_info(
            engine.name,
            identity.version or "unknown",
            engine_policy=identity.policy,
            sampling=sampling.settings,
        )
        info.check()
        with only_writer(out):
            shards = SessionShards(out, info, policy_version)
            recorder = Recorder(
                most_sessions,
                idle_s,
                say,
                shards,
                engine=engine,
                policy=shards.policy,
                vocab_size=model.vocab_size,
                **of_sessions,
            )
            watch = asyncio.ensure_future(recorder.end_idle_sessions())
            try:
                yield recorder
            finally:
                watch.cancel()
                await recorder.name_the_rest()
                recorder.close()
    finally:
        await engine.close()


class Recorder(Sessions):
    """Opens a session for each new name, and stores the sessions that are rewarded.

    Args:
        most_sessions: how many sessions may be open at a time.
        idle_s: a session without a request for so many seconds ends. The reward function rewards
            the session; without a reward function the session is dropped, and a line says so.
        say: prints a line about a session.
        shards: writes the rollouts.
        of_sessions: the arguments of `Sessions`.
    """

    def __init__(
        self,
        most_sessions: int,
        idle_s: float,
        say: Callable[[str], None],
        shards: SessionShards,
        **of_sessions: Any,
    ) -> None:
        super().__init__(**of_sessions)
        self._most, self._idle_s, self._say, self._shards = most_sessions, idle_s, say, shards

    @property
    def stored(self) -> int:
        """How many rollouts were written."""
        return self._shards.stored

    def admit(self, name: str) -> Open:
        """The session of that name; a new name opens a session.

        Raises:
            Busy: there are too many sessions.
        """
        if name not in self.open and len(self.open) >= self._most:
            raise Busy(f"{len(self.open)} sessions are open: reward or discard one of them first")
        return self.open.setdefault(name, Open(_shown(name)))

    async def answer(self, name: str, question: Question) -> tuple[list[Turn], int]:
        """See `Sessions.answer`; a session that has had no response is forgotten."""
        try:
            return await super().answer(name, question)
        finally:
            one = self.open.get(name)
            if one is not None and not one.session.turns and not one.at_work:
                del self.open[name]

    async def end(self, name: str, reward: Any = None) -> tuple[int, list[float]]:
        """Store a session's rollouts, and forget the session.

        The session is stored even if the client does not wait for the answer. A second request to
        end the session, while the first one is at work, gets the answer of the first one.

        Args:
            reward: as in `Sessions.rewarded`.

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
            _refuse_at_work(one)
            one.ending = asyncio.ensure_future(self._end(name, one, reward))
            # a client may have gone away: then nobody else asks for the task's error
            one.ending.add_done_callback(lambda task: task.cancelled() or task.exception())
        return len(one.session.turns), await asyncio.shield(one.ending)

    async def _end(self, name: str, one: Open, reward: Any) -> list[float]:
        try:
            rollouts = await self.rewarded(one, reward)
            assert one.first is not None, "a session without an answer is forgotten"
            await self._shards.store(rollouts, one.first[1])
        except BaseException:
            one.ending = None  # the session stays, and can be rewarded again
            raise
        if self.open.get(name) is one:
            del self.open[name]
        return [rollout.reward for rollout in rollouts]

    def discard(self, name: str) -> None:
        """Forget a session.

        Raises:
            NoSession: there is no such session.
            Busy: a request of the session is under way, or it is being rewarded.
        """
        one = self._get(name)
        _refuse_at_work(one)
        if one.ending is not None:
            raise Busy(f"{one} is being rewarded")
        del self.open[name]

    def _get(self, name: str) -> Open:
        try:
            return Sessions.admit(self, name)
        except NoSession as error:
            raise NoSession(f"{_shown(name)}: {error}") from error

    async def end_idle_sessions(self) -> None:
        """End the sessions that had no request for `idle_s`, until this task is cancelled."""
        while True:
            await asyncio.sleep(min(_LOOK_S, self._idle_s))
            for name, one in list(self.open.items()):
                # a reward function may take its time: meanwhile other sessions have gone on
                is_gone = self.open.get(name) is not one or one.ending is not None
                if is_gone or one.at_work or time.monotonic() - one.used < self._idle_s:
                    continue
                reason = f"it got neither a request nor a reward for {self._idle_s:g} s"
                if self._reward is not None:
                    try:
                        await self.end(name)
                        continue
                    except Exception as error:
                        reason = str(error)
                if self.open.get(name) is one:
                    del self.open[name]
                self._say(one_line(f"not stored: {one}: {reason}", 500))

    async def name_the_rest(self) -> None:
        """Wait for the sessions that are being rewarded, and print a line for each other one."""
        endings = [one.ending for one in self.open.values() if one.ending is not None]
        await asyncio.gather(*endings, return_exceptions=True)
        for one in self.open.values():
            self._say(f"not stored: {one}: it has no reward")


def _refuse_at_work(one: Open) -> None:
    if one.at_work:
        raise Busy(f"{one}: {one.at_work} of its requests are under way")


def _shown(name: str) -> str:
    """A session's name in messages: an API key is shown as a digest."""
    kind, _, text = name.partition(":")
    if kind == "key":
        text = f"of the key with the digest {sha256(text.encode()).hexdigest()[:8]}"
    return one_line(f"session {text}", 200)
