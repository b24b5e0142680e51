"""The branches of a session: which response a request continues, and which rollouts come of it.

A response of the engine is a `Turn`. If the messages of a request begin with all messages of a
turn, the request continues that turn: its ids are the turn's ids and the ids of what is new. Any
other request begins a branch of its own, from ids that the chat template makes of all its messages.
Example (u: the user's ids, s: sampled ids, t: ids of a tool's answer):

    request 1                    u u          the engine adds s s      turn 1
    request 2, continues turn 1  u u s s t t  the engine adds s        turn 2
    request 3, continues turn 1  u u s s u    the engine adds s s      turn 3

Turns 2 and 3 end two branches, so there are two rollouts: `u u s s t t s` and `u u s s u s s`. Both
have the two ids that turn 1 sampled. The first rollout trains these ids; the second one has them as
a part of its prompt. So each sampled id is trained once.

Shape suffixes (docs/glossary.md): C, N, U.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import accumulate
from typing import Any

import numpy as np

from megatron_r3.data.engines.conversation import Increment, stitch
from megatron_r3.data.rollout import Rollout

Message = Mapping[str, Any]
# What a client sends of a conversation: the messages of a chat, or a completion's text or ids.
Asked = list[Message] | str | list[int]
_JSON = json.JSONEncoder(sort_keys=True)


@dataclass(frozen=True, eq=False)
class Turn:
    """One response of the engine.

    Attributes:
        before: the turn that its request continued; None if the request began a branch.
        increment: all ids up to the end of the response, and the rows that the engine returned.
        asked: what was asked: messages, text or ids. For a turn that continues another turn, only
            what is new.
        message: the message that the client got.
        finish_reason: why the response ended, in the engine's words.
    """

    before: Turn | None
    increment: Increment
    asked: Asked
    message: Message
    finish_reason: str

    @property
    def branch(self) -> list[Turn]:
        """The turns of this turn's conversation, from the first one to this one."""
        branch: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            branch.append(turn)
            turn = turn.before
        return branch[::-1]

    @property
    def span(self) -> tuple[int, int]:
        """The first id that this turn sampled, and the end of its ids."""
        return self.increment.prompt_length, len(self.increment.tokens_N)


class Session:
    """The turns of one session, in the order in which the engine answered.

    Attributes:
        turns: all turns.
    """

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._by_digest: dict[bytes, Turn] = {}
        self._by_text: list[tuple[str | list[int], Turn]] = []

    def find(self, asked: Asked, digests: Sequence[bytes]) -> tuple[Turn | None, Asked]:
        """The longest turn that a request continues, and what is new in the request.

        Args:
            asked: the request's messages, text or ids.
            digests: those of the messages (`digests_of`); empty for a text or ids.

        Returns:
            None and all that was asked, if the request continues no turn.
        """
        if digests:
            for length in range(len(asked) - 1, 0, -1):  # at least one message is new
                if (turn := self._by_digest.get(digests[length - 1])) is not None:
                    return turn, asked[length:]
            return None, asked
        best: tuple[Turn | None, Asked] = (None, asked)
        for whole, turn in self._by_text:
            is_new = len(asked) - len(whole)
            if 0 < is_new <= len(best[1]) and asked[: len(whole)] == whole:
                best = turn, asked[len(whole) :]
        return best

    def add(self, turn: Turn, asked: Asked, digests: Sequence[bytes], stopped: bool) -> None:
        """Remember a turn.

        Args:
            asked: the whole request's messages, text or ids.
            digests: as in `find`.
            stopped: whether the request had texts at which the response ends. The engine's ids may
                then hold such a text, which the client did not get. So a later completion cannot
                continue this turn by its text, and begins a branch.
        """
        self.turns.append(turn)
        if isinstance(asked, str):
            if not stopped:
                self._by_text.append((asked + turn.message["content"], turn))
        elif digests:
            self._by_digest[_next_digest(digests[-1], turn.message)] = turn
        else:
            self._by_text.append((turn.increment.tokens_N.tolist(), turn))

    def branches(self) -> list[list[Turn]]:
        """The turns of each branch: one branch for each turn that no other turn continues."""
        continued = {turn.before for turn in self.turns}
        return [turn.branch for turn in self.turns if turn not in continued]

    def rollouts(self, where: str, all_turns: bool = False) -> list[Rollout]:
        """One rollout for each branch, without reward and name.

        Args:
            where: the session's name in errors.
            all_turns: train each sampled id in every branch that has it, not in the first one only.

        Raises:
            EngineError: the responses of a branch contradict each other.
        """
        rollouts, trained = [], set[Turn]()
        for branch in self.branches():
            own = [turn for turn in branch if all_turns or turn not in trained]
            trained.update(branch)
            rollouts.append(_rollout(branch, own, where))
        return rollouts

    def rollouts_by_turn(self, where: str) -> list[Rollout]:
        """One rollout for each turn of the only branch, which trains what that turn sampled.

        Raises:
            ValueError: the session has several branches, or its responses contradict each other.
        """
        branches = self.branches()
        if len(branches) != 1:
            raise ValueError(
                f"{where} has {len(branches)} branches: a reward for each turn needs a session "
                "with one branch; give one reward"
            )
        return [_rollout(turn.branch, [turn], where) for turn in branches[0]]


def _rollout(branch: Sequence[Turn], own: Sequence[Turn], where: str) -> Rollout:
    """The rollout of a branch, in which only what the turns of `own` sampled is trained."""
    whole = stitch([turn.increment for turn in branch], where)
    turns_U2 = np.array([turn.span for turn in own], np.int32)
    response_N = np.zeros(len(whole.tokens_N), bool)
    for first, end in turns_U2.tolist():
        response_N[first:end] = True
    kept = whole.kept
    if kept is not None:
        kept = kept.take(np.where(response_N, np.arange(len(response_N)), -1))
    return replace(
        whole,
        response_N=response_N,
        turns_U2=turns_U2,
        logprobs_N=np.where(response_N, whole.logprobs_N, np.float32(0)),
        kept=kept,
        versions_C2=None,  # the recorder takes responses of one version of the weights alone
    )


def digests_of(messages: Sequence[Message], settings: Any) -> list[bytes]:
    """A digest of the first message, of the first two, and so on, each with the settings.

    A client may send a message back in other words of JSON: with fields that are null, with a text
    as a list of parts, with blanks in the arguments of a call. `_plain` makes these equal.

    Args:
        messages: the whole conversation.
        settings: whatever else the chat template reads, for example the tools.

    Raises:
        ValueError: the content or the tool calls of a message are not in OpenAI's form.
    """
    start = sha256(_JSON.encode(settings).encode()).digest()
    return list(accumulate(messages, _next_digest, initial=start))[1:]


def _next_digest(digest: bytes, message: Message) -> bytes:
    return sha256(digest + _JSON.encode(_plain(message)).encode()).digest()


def _plain(message: Message) -> dict[str, Any]:
    """The fields of a message that are not empty, with its text stripped and its calls read."""
    plain = {name: value for name, value in message.items() if value not in (None, "", [], {})}
    if "content" in plain and not (text := text_of(message).strip()):
        del plain["content"]
    elif "content" in plain:
        plain["content"] = text
    if "tool_calls" in plain:
        plain["tool_calls"] = [[call.get("id"), *call_parts(call)] for call in calls_of(message)]
    return plain


def text_of(message: Message) -> str:
    """The text of a message. Its content may be null, a text, or a list of parts of text.

    Raises:
        ValueError: the content is something else.
    """
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(_texts(content))


def _texts(parts: Any) -> Iterator[str]:
    for part in parts if isinstance(parts, list) else [parts]:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise ValueError("a message's content is a text, or a list of parts of type text")
        yield text


def calls_of(message: Message) -> list[Message]:
    """The tool calls of a message.

    Raises:
        ValueError: they are no list of objects.
    """
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError("a message's tool_calls are a list of objects")
    return calls


def call_parts(call: Message) -> tuple[str, Any]:
    """The name and the arguments of a tool call; arguments that are no JSON stay a text.

    Raises:
        ValueError: the call has no function.
    """
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError("a tool call needs a function with a name")
    arguments = function.get("arguments") or {}
    try:
        return function["name"], json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return function["name"], arguments
