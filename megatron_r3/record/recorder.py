"""Records the sessions of clients in other processes, and ends each session when it is rewarded.

An agent may work for hours, so a session ends only when a client sends its reward. The session's
rollouts are in the store (session_shards.py) before the request with the reward is answered. A kill
loses the sessions that have not ended; the next recorder of the store names them (`UnderWay`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
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
_LOST = (
    "the recorder was killed while this session was under way, so its responses are lost, unless "
    "its reward was sent just before"
)


class UnderWay:
    """The sessions with a response and without an end, in a file that outlives a kill.

    The file is `.sessions` in the store's directory. It gets a line `+NAME` when a session has had
    its first response, and a line `-NAME` when the session ends. A crash of the machine may lose
    lines, because they are not synced to the disk.

    Args:
        out: the store's directory.

    Attributes:
        lost: the sessions that were under way when an earlier recorder was killed.
    """

    def __init__(self, out: Path) -> None:
        self._path, self.lost, self._now = out / ".sessions", set[str](), set[str]()
        self._file = self._path.open("a+b", buffering=0)
        self._path.chmod(0o600)  # who knows the name of a session can end the session
        self._file.seek(0)
        for line in self._file.read().decode(errors="replace").splitlines():
            (self.lost.add if line[:1] == "+" else self.lost.discard)(line[1:])

    def add(self, session: str) -> None:
        """Note that a session has had a response."""
        if session not in self._now:
            self._now.add(session)
            self._write(f"+{session}\n")

    def remove(self, session: str) -> None:
        """Note that a session has ended, or that a lost session is given up."""
        self._now.discard(session)
        self.lost.discard(session)
        self._write(f"-{session}\n")

    def _write(self, line: str) -> None:
        with suppress(OSError):  # a full disk must not fail a request after its rollouts are stored
            self._file.write(line.encode())

    def close(self) -> None:
        """Remove the file: the recorder was not killed, and names the sessions itself."""
        self._file.close()
        self._path.unlink()


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

    At its start it prints a line for each session that was lost when a recorder was killed.

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
            shards, under_way = SessionShards(out, info, policy_version), UnderWay(out)
            for session in sorted(under_way.lost):
                say(f"not stored: {session}: {_LOST}")
            recorder = Recorder(
                most_sessions,
                idle_s,
                say,
                shards,
                under_way,
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
                under_way.close()
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
        under_way: the sessions that a kill would lose, and those that a kill has lost.
        of_sessions: the arguments of `Sessions`.
    """

    def __init__(
        self,
        most_sessions: int,
        idle_s: float,
        say: Callable[[str], None],
        shards: SessionShards,
        under_way: UnderWay,
        **of_sessions: Any,
    ) -> None:
        super().__init__(**of_sessions)
        self._most, self._idle_s, self._say, self._shards = most_sessions, idle_s, say, shards
        self._under_way = under_way

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
        """See `Sessions.answer`; a session that has had no response is forgotten.

        Raises:
            NoSession: the request does not begin a conversation, and a kill has lost the session.
        """
        session = _shown(name)
        if session in self._under_way.lost:
            # With a request that goes on, the lost responses would become a part of a prompt.
            if not question.begins:
                raise NoSession(f"{session}: {_LOST}; discard it, or begin it anew")
            self._under_way.remove(session)
        try:
            return await super().answer(name, question)
        finally:
            one = self.open.get(name)
            if one is not None and one.session.turns:
                self._under_way.add(session)
            elif one is not None and not one.at_work:
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
            # if the client went away, no other code asks for the task's error
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
            self._forget(name)
        return [rollout.reward for rollout in rollouts]

    def discard(self, name: str) -> None:
        """Forget a session, also one that a kill has lost.

        Raises:
            NoSession: there is no such session.
            Busy: a request of the session is under way, or it is being rewarded.
        """
        if _shown(name) in self._under_way.lost:
            self._under_way.remove(_shown(name))
            return
        one = self._get(name)
        _refuse_at_work(one)
        if one.ending is not None:
            raise Busy(f"{one} is being rewarded")
        self._forget(name)

    def _forget(self, name: str) -> None:
        del self.open[name]
        self._under_way.remove(_shown(name))

    def _get(self, name: str) -> Open:
        try:
            return Sessions.admit(self, name)
        except NoSession as error:
            session = _shown(name)
            reason = _LOST if session in self._under_way.lost else error
            raise NoSession(f"{session}: {reason}") from error

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
                    self._forget(name)
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
    return one_line(f"session {text}", 300)
