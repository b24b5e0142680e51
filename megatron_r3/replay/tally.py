"""How often live routers would have chosen other experts in one forward pass.

Shape suffixes (docs/glossary.md): T.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class Tally:
    """Which tokens of a micro-batch are compared with the live choice, and how many differ.

    Each micro-batch needs a tally of its own. The counts stay on the device until they are read.
    Each layer is counted once, in the first pass of that layer; a recompute is not counted again.

    Args:
        counted_T: bool, True for tokens that count in the mismatch. A token that chooses live in a
            layer never differs there.
        watched_T: bool, True for all tokens to compare: those of `counted_T`, and others. None
            means that only counted tokens are compared.

    Attributes:
        mismatched: for each layer the number of counted tokens for which the live choice is another
            set of experts than the given one; int64 scalars.
        mismatched_T: bool, True for counted tokens that mismatch in any layer of this rank. None
            until a layer was counted.
        mismatched_watched: as `mismatched`, for watched tokens; empty without watched tokens.
        mismatches_T: in how many layers of this rank each watched token mismatches, int16. None
            without watched tokens, and until a layer was counted.
    """

    counted_T: Tensor
    watched_T: Tensor | None = None
    mismatched: dict[int, Tensor] = field(default_factory=dict, init=False)
    mismatched_T: Tensor | None = field(default=None, init=False)
    mismatched_watched: dict[int, Tensor] = field(default_factory=dict, init=False)
    mismatches_T: Tensor | None = field(default=None, init=False)
    _claimed: bool = field(default=False, init=False)

    def claim(self) -> bool:
        """Take this tally for a micro-batch; False if a micro-batch took it before."""
        claimed, self._claimed = self._claimed, True
        return not claimed

    def fresh(self) -> Tally:
        """The same tokens for another forward pass: nothing is counted."""
        return Tally(self.counted_T, self.watched_T)

    def compared_in(self, layer_number: int) -> Tensor | None:
        """The tokens `[T]` to compare in this layer; None if the layer was counted before."""
        if layer_number in self.mismatched:
            return None
        return self.counted_T if self.watched_T is None else self.watched_T

    def add(self, layer_number: int, differs_T: Tensor) -> None:
        """Count the tokens that differ in one layer.

        Args:
            differs_T: bool, the compared tokens for which the live choice is another set of
                experts.
        """
        if self.watched_T is not None:
            self.mismatched_watched[layer_number] = differs_T.sum()
            before_T = self.mismatches_T
            once_T = differs_T.to(torch.int16)
            self.mismatches_T = once_T if before_T is None else before_T + once_T
            differs_T = differs_T & self.counted_T
        self.mismatched[layer_number] = differs_T.sum()
        any_T = self.mismatched_T
        self.mismatched_T = differs_T if any_T is None else any_T | differs_T
