"""What tells two things apart: the digests that all of this package compares.

Five things have an identity:

    policy    a number (its version), and a stamp of all weights (`fingerprint.policy_stamp`). The
              stamps of single routers are the part of it that a trainer can work out by itself
    shard     the digest of what its header says, checksums included (`store.header`)
    rollout   policy version, group and sample: no two rollouts of a store share all three
    tree      git's id of each file that the patches change (`patching.git.blob_id`)
    bytes     the digest of a file
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

_PIECE = 1 << 22  # bytes that are in memory at a time


def digest(data: bytes | str) -> str:
    """The SHA-256 of some bytes, or of a text in UTF-8, in 64 hex digits."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def short_digest(data: bytes | str) -> str:
    """The first 16 hex digits of the digest, for a line that people read."""
    return digest(data)[:16]


def digest_number(data: bytes, bits: int) -> int:
    """The first bits of the digest as a number, e.g. 63 for one that an int64 can hold."""
    return int(digest(data), 16) >> (256 - bits)


def file_digest(path: Path) -> str:
    """The digest of a file, which is read a few megabytes at a time.

    Raises:
        OSError: it cannot be read.
    """
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            whole.update(piece)
    return whole.hexdigest()


def file_digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The digests of some files of a folder, by name."""
    return {name: file_digest(folder / name) for name in sorted(names)}
