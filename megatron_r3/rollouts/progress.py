"""How far a collection is: one line of a terminal, written again and again."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

__all__ = ["Progress"]

INTERVAL = 0.2


@dataclass
class Progress:
    """Counts, and shows them where stderr is a terminal.

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
    _started: float = field(default_factory=time.monotonic)
    _shown: float = 0.0

    def show(self, last: bool = False) -> None:
        """Write the line, not more than a few times a second."""
        if not sys.stderr.isatty():
            return
        now = time.monotonic()
        if last or now - self._shown > INTERVAL:
            self._shown = now
            print(
                f"\r\x1b[K{self.line(now)}", end="\n" if last else "", file=sys.stderr, flush=True
            )

    def line(self, now: float) -> str:
        """What the terminal shows."""
        done = self.before + self.stored + self.waiting
        seconds = max(now - self._started, 1e-3)
        filled = 24 * done // max(self.total, 1)
        rate = (self.stored + self.waiting) / seconds
        parts = [f"[{'#' * filled}{'.' * (24 - filled)}] {done}/{self.total} rollouts"]
        parts.append(f"{self.tokens / seconds:.0f} tokens/s")
        if rate and done < self.total:
            parts.append(f"{(self.total - done) / rate:.0f} s left")
        parts += [f"{self.retries} retries"] if self.retries else []
        parts += [f"{self.refused} refused"] if self.refused else []
        return ", ".join(parts)

    def say(self, text: str) -> None:
        """A line of its own on stderr, terminal or not."""
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(f"{clear}{text}", file=sys.stderr, flush=True)
