"""Whether two ways to compute a gate agree, as far as their rounding allows.

Shape suffixes (docs/glossary.md): T, E.
"""

from __future__ import annotations

import torch


def agree(
    got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], upstream_TE: torch.Tensor
) -> bool:
    """Whether probabilities, gradient and map are the same, but for rounding.

    Args:
        got, want: probabilities, gradient of the logits, and map, each `[T, E]`.
        upstream_TE: the gradient of the probabilities.

    Allowed are 64 roundings of float32 arithmetic on numbers as large as the largest, and two
    roundings to the dtype of the result.
    """
    (*got_values, got_map_TE), (*want_values, want_map_TE) = got, want
    if not torch.equal(got_map_TE, want_map_TE):
        return False
    largest = want_values[0].abs().max().float()
    sizes = (largest, largest * upstream_TE.abs().max())
    for got_TE, want_TE, size in zip(got_values, want_values, sizes, strict=True):
        room_TE = 64 * torch.finfo(torch.float32).eps * size
        room_TE = room_TE + 2 * torch.finfo(got_TE.dtype).eps * want_TE.float().abs()
        if not bool(((got_TE.float() - want_TE.float()).abs() <= room_TE).all()):
            return False
    return True
