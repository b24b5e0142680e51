"""Memory that is freed stays with the process: the next shard's routes go where the last ones were.

glibc gives freed memory back to the system, which clears every page of it before it lends it again;
of decoding and storing routes that was a fifth of the time.
"""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc takes no more


def keep_freed_memory() -> None:
    """Tell the allocator; for commands that move many rollouts and then end. No glibc: nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
