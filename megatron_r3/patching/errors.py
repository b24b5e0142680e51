"""What the user of the patching tool is told: every refusal is a PatchingError."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["PatchingError", "names"]


class PatchingError(ValueError):
    """A refusal; the message names the file and what to do. The tree is as it was before."""


def names(items: Sequence[str], most: int = 5) -> str:
    """The items as one line of text: at most `most` of them, then how many more there are."""
    text = ", ".join(items[:most])
    return text if len(items) <= most else f"{text} and {len(items) - most} more"
