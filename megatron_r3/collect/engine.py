"""What a collection needs from an engine: who it is, a sample, and that it is still the same.

`collect` has one path for every engine. The engines differ behind the interface `Engine`:
`server.Server` asks a vLLM or SGLang server over HTTP, and `generate.Transformers` runs the model
in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megatron_r3.collect.prompts import Prompt
from megatron_r3.collect.writing import Shelf
from megatron_r3.data.engines.said import Said
from megatron_r3.data.engines.shape import EngineError
from megatron_r3.data.rollout import Rollout


class NoAnswer(EngineError):
    """The engine gave no answer, and the same request again would not change that.

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
    """What an engine says of itself. A field is empty where the engine does not say it.

    Attributes:
        version: the version of the engine.
        model: the name under which the engine has its model.
        policy: the version of the weights, as whoever loaded them into the engine named it.
    """

    version: str = ""
    model: str = ""
    policy: str = ""


@dataclass(frozen=True)
class Answer:
    """One sample, without the response body that it came in, which may be many times as large.

    Attributes:
        decoded: tokens, log-probs and routes, checked; the reward and the name are not known yet.
        said: what the engine says beside.
    """

    decoded: Rollout
    said: Said


class Engine(Protocol):
    """Something that samples one response at a time; many calls of `sample` may be under way."""

    name: str

    def check(self, prompt: Prompt) -> None:
        """Refuse a prompt that this engine cannot be asked; asks nothing.

        Raises:
            PromptError: naming the line of the prompt.
        """

    async def begin(self, on_retry: Callable[[], None]) -> Identity:
        """Find out who the engine is.

        Args:
            on_retry: called before each repetition of a request.

        Raises:
            EngineError: the engine does not answer, or the answer is not that of such an engine.
        """

    async def sample(self, prompt: Prompt, seed: int | None, where: str) -> Answer:
        """Sample one response to a prompt.

        Args:
            seed: of this sample alone; None leaves the choice to the engine.
            where: how errors call this sample.

        Raises:
            NoAnswer: there is no response, and asking again is of no use.
            EngineError: there is a response that cannot be used. Another one may be usable.
        """

    async def confirm(self) -> None:
        """Return if the engine, asked after this call began, is still the one that `begin` met.

        Raises:
            EngineChanged: it is another one.
            NoAnswer: it does not say who it is.
        """

    async def close(self) -> None:
        """Give up what the engine holds: connections, threads."""


class EnginePolicy:
    """Holds all samples of one policy version to one version of the engine's weights.

    An engine may report the version of its weights: SGLang in each response and on its page, vLLM
    on a page if the server takes new weights, and from 0.32 on in responses. The first version that
    is reported is kept and stored. Every later response must report the same.

    Args:
        shelf: writes the shards, whose header holds the version.
        stored: the version that the store's rollouts of this policy version name. None means that
            there are no such rollouts.
    """

    def __init__(self, shelf: Shelf, stored: str | None) -> None:
        at_the_start = shelf.info.engine_policy
        self._shelf = shelf
        self._known: str | None = (at_the_start or None) if stored is None else stored
        # The store names a version and the engine's page did not: then each response has to.
        self._responses_must_say = bool(stored) and not at_the_start
        if stored is not None:
            shelf.info = replace(shelf.info, engine_policy=stored)

    def check(self, reported: Sequence[str], where: str) -> None:
        """Refuse a response that other weights sampled, or that two versions of them sampled.

        Args:
            reported: the versions that the response names; empty if the engine reports none.
            where: how errors call the response.

        Raises:
            EngineChanged: naming both versions.
        """
        if not reported and self._responses_must_say:
            raise EngineChanged(
                f"{where}: the engine does not say which weights sampled; the rollouts in "
                f"{self._shelf.out} are of its weights {self._known!r}: give another "
                "--policy-version or --out"
            )
        for version in reported:
            if self._known is None and self._shelf.stored:
                # Shards without a version are written already, so "no version" is what is known.
                self._known = ""
            if self._known is None:
                self._known = version
                self._shelf.info = replace(self._shelf.info, engine_policy=version)
            elif version != self._known:
                before = repr(self._known) if self._known else "without a version"
                raise EngineChanged(
                    f"{where}: the engine's weights were {before} and are {version!r} now: "
                    "a --policy-version stands for one policy; give the new weights another one"
                )
