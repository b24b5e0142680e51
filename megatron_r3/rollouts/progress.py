"""How far a collection is: counts, and a bar where stderr is a terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import TracebackType

from tqdm import tqdm

from megatron_r3.untrusted import one_line


@dataclass
class Progress:
    """Counts, and shows them.

    Attributes:
        total, before: rollouts that the store shall have, and those it had.
        stored, waiting: those it got, and those that wait for their shard.
        retries, refused: requests that were repeated; responses that the decoder refused.
        tokens: of the responses taken.
    """

    total: int = 0
    before: int = 0
    stored: int = 0
    waiting: int = 0
    retries: int = 0
    refused: int = 0
    tokens: int = 0
    _bar: tqdm | None = field(default=None, repr=False)

    def __enter__(self) -> Progress:
        """Show the bar."""
        self._bar = tqdm(
            total=self.total, initial=self.before, unit=" rollouts", file=sys.stderr, disable=None
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave it as it is."""
        assert self._bar is not None
        self.show()
        self._bar.close()

    def show(self) -> None:
        """Bring the bar up to date."""
        if self._bar is not None and not self._bar.disable:
            counts = {"tokens": self.tokens, "retries": self.retries, "refused": self.refused}
            self._bar.set_postfix({k: v for k, v in counts.items() if v}, refresh=False)
            self._bar.update(self.before + self.stored + self.waiting - self._bar.n)

    def say(self, text: str) -> None:
        """A line of its own on stderr, terminal or not."""
        tqdm.write(one_line(text), file=sys.stderr)
