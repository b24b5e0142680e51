"""The progress of a collection: its counts, and a bar if stderr is a terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from megatron_r3.replay.words import one_line

try:
    from tqdm import tqdm
except ImportError as missing:  # an optional dependency: a trainer does not need it
    raise ValueError(
        "collecting rollouts needs tqdm: pip install 'megatron-r3[collect]'"
    ) from missing


@dataclass
class Progress:
    """The counts of a collection, and the bar that shows them.

    Attributes:
        total: rollouts that the store is to have in the end.
        before: rollouts that the store had at the start, of those that are wanted.
        stored: rollouts that were written since the start.
        waiting: rollouts that stay in memory until their group is whole and their shard full.
        retries: repetitions of requests.
        refused: responses that could not be used.
        tokens: sampled tokens of the rewarded responses.
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
        """Show the bar, if stderr is a terminal (`disable=None`)."""
        self._bar = tqdm(
            total=self.total, initial=self.before, unit=" rollouts", file=sys.stderr, disable=None
        )
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the bar on the screen as it is."""
        assert self._bar is not None
        self.show()
        self._bar.close()

    def on_retry(self) -> None:
        """Count the repetition of a request."""
        self.retries += 1
        self.show()

    def show(self) -> None:
        """Bring the bar up to date."""
        if self._bar is not None and not self._bar.disable:
            counts = {"tokens": self.tokens, "retries": self.retries, "refused": self.refused}
            self._bar.set_postfix({k: v for k, v in counts.items() if v}, refresh=False)
            self._bar.update(self.before + self.stored + self.waiting - self._bar.n)

    def say(self, text: str) -> None:
        """Print a line of its own on stderr, above the bar if there is one."""
        tqdm.write(one_line(text), file=sys.stderr)
