"""What a collection needs from an engine: its identity, samples, and whether it has changed.

`collect` calls every engine by the interface `Engine`. `server.Server` asks a vLLM, SGLang or
Megatron server over HTTP, and `generate.Transformers` runs the model in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megatron_r3.collect.prompts import Prompt
from megatron_r3.collect.writing import Shelf
from megatron_r3.data.engines.conversation import Increment
from megatron_r3.data.engines.said import Said
from megatron_r3.data.engines.shape import EngineError
from megatron_r3.data.rollout import Rollout


class NoAnswer(EngineError):
    """The engine gave no answer: repetitions failed, or would fail in the same way.

    Attributes:
        status: the HTTP status, if a server refused the request; None otherwise.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class EngineChanged(ValueError):
    """The engine or its weights are not those with which the collection began."""


@dataclass(frozen=True)
class Identity:
    """What an engine says of itself. A field that the engine does not tell is empty.

    Attributes:
        version: the version of the engine.
        model: the name under which the engine has its model.
        policy: the name of the weights' version, which was given when the weights were loaded.
    """

    version: str = ""
    model: str = ""
    policy: str = ""


@dataclass(frozen=True)
class Answer:
    """One decoded sample, without the response body, which may be many times as large.

    Attributes:
        decoded: tokens, log-probs and routes, checked; reward, group and sample number are not set.
        said: the text, why the response ended, and which weights sampled, as the engine says them.
    """

    decoded: Rollout
    said: Said

    @classmethod
    def of(cls, increment: Increment) -> Answer:
        """An increment as an answer.

        Raises:
            EngineError: the increment's rows do not begin at token 0.
        """
        return cls(increment.whole(), increment.said)


class Engine(Protocol):
    """The interface of an engine. A call of `sample` gives one response; many may be under way."""

    name: str

    def check(self, prompt: Prompt) -> None:
        """Refuse a prompt that this engine does not take; the engine is not asked.

        Raises:
            PromptError: naming the line of the prompt.
        """

    async def begin(self, on_retry: Callable[[], None]) -> Identity:
        """Ask the engine for its identity.

        Args:
            on_retry: called before each repetition of a request.

        Raises:
            EngineError: there is no answer, or an answer that no engine of this kind gives.
        """

    async def sample(self, prompt: Prompt, seed: int | None, where: str) -> Answer:
        """Sample one response to a prompt.

        Args:
            seed: the seed of this sample alone; None leaves the choice to the engine.
            where: the name of this sample in errors.

        Raises:
            NoAnswer: there is no response, and asking again is of no use.
            EngineError: the response cannot be used; a second response may be usable.
        """

    async def confirm(self) -> None:
        """Ask for the engine's identity again; return if it equals the one that `begin` returned.

        The engine must be asked after this call began: an earlier answer proves nothing.

        Raises:
            EngineChanged: the identity differs.
            NoAnswer: the engine does not tell its identity.
        """

    async def close(self) -> None:
        """Close the engine's connections and threads."""


class EnginePolicy:
    """Refuses rollouts of one policy version that two versions of the engine's weights sampled.

    An engine may report the version of its weights: SGLang in each response and at /model_info,
    vLLM at /weight_info if the server takes new weights, and from 0.32 on in responses. A store
    keeps the first version that is reported, and a later response may report no other. If the store
    has shards without a version, no response may report one.

    Args:
        shelf: writes the shards, and the version into their headers.
        stored: the version of the engine's weights in the store's shards of this policy version;
            "" if these shards name none; None if the store has no shard of this policy version.
    """

    def __init__(self, shelf: Shelf, stored: str | None) -> None:
        at_the_start = shelf.info.engine_policy
        self._shelf = shelf
        self._known: str | None = (at_the_start or None) if stored is None else stored
        # If the store names a version and the engine did not at the start, each response must name
        # one.
        self._responses_must_say = bool(stored) and not at_the_start
        if stored is not None:
            shelf.info = replace(shelf.info, engine_policy=stored)

    def check(self, reported: Sequence[str], where: str) -> None:
        """Refuse a response that other weights sampled, or several versions of the weights.

        Args:
            reported: the versions that the response names; empty if the engine reports none.
            where: the name of the response in errors.

        Raises:
            EngineChanged: the response names another version than the first one; or the response
                names none, while the store names one and the engine named none at the start.
        """
        if not reported and self._responses_must_say:
            raise EngineChanged(
                f"{where}: the engine does not say which weights sampled; the rollouts in "
                f"{self._shelf.out} were sampled by its weights {self._known!r}: give another "
                "--policy-version or --out"
            )
        for version in reported:
            if self._known is None and self._shelf.stored:
                # The headers of the shards so far name no version, so no response may name one.
                self._known = ""
            if self._known is None:
                self._known = version
                self._shelf.info = replace(self._shelf.info, engine_policy=version)
            elif version != self._known:
                before = repr(self._known) if self._known else "without a version"
                raise EngineChanged(
                    f"{where}: the engine's weights were {before} and are {version!r} now: give "
                    "the new weights another --policy-version"
                )
