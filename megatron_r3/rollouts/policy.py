"""The version of its weights that an engine itself reports: one policy version of a store has one.

SGLang says it in each response, and on its page; vLLM on a page where it takes new weights, and
from 0.32 on in responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_r3.rollouts.server import ServerChanged
from megatron_r3.rollouts.shelf import Shelf

__all__ = ["EnginePolicy"]


class EnginePolicy:
    """What the engine reported first; every later response must agree.

    Args:
        shelf: whose info says it.
        stored: what the store's rollouts of this policy version say; None: it has none.
    """

    def __init__(self, shelf: Shelf, stored: str | None) -> None:
        at_the_start = shelf.info.engine_policy
        self._shelf = shelf
        self._known: str | None = (at_the_start or None) if stored is None else stored
        # a store that says it, and a server that did not so far
        self._asked_for = bool(stored) and not at_the_start
        if stored is not None:
            shelf.info = replace(shelf.info, engine_policy=stored)

    def check(self, reported: Sequence[str], where: str) -> None:
        """Refuse a response that other weights sampled, or that two of them did.

        Args:
            reported: what the response says; nothing where the engine does not.
            where: what errors call the response.

        Raises:
            ServerChanged: naming both versions.
        """
        if not reported and self._asked_for:
            raise ServerChanged(
                f"{where}: the engine does not say which weights sampled; the rollouts in "
                f"{self._shelf.out} are of its weights {self._known!r}: take another "
                "--policy-version or --out"
            )
        for version in reported:
            if self._known is None and self._shelf.stored:
                self._known = ""  # that is what its shards say
            if self._known is None:
                self._known = version
                self._shelf.info = replace(self._shelf.info, engine_policy=version)
            elif version != self._known:
                before = repr(self._known) if self._known else "without a version"
                raise ServerChanged(
                    f"{where}: the engine's weights were {before} and are {version!r} now: one "
                    "--policy-version is one policy; give the new one another"
                )
