"""SHA-256 digests.

This table says what is compared to tell whether two things are the same:

policy    its version number, a stamp of all its weights (`fingerprint.policy_stamp`), and a
          digest of each router's weights, which a trainer can compute from its own weights
shard     the short digest of its header's text, which holds all checksums (`store.header`)
rollout   policy version, group and sample: no two rollouts of a directory share all three
tree      git's id of each file that the patches change (`patching.git.blob_id`)
file      the digest of its bytes
"""

from __future__ import annotations

import hashlib
from pathlib import Path


def digest(data: bytes | str) -> str:
    """The SHA-256 of some bytes, or of a text in UTF-8, in 64 hex digits."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def short_digest(data: bytes | str) -> str:
    """The first 16 hex digits of the SHA-256 of some bytes, or of a text in UTF-8."""
    return digest(data)[:16]


def digest_number(data: bytes, bits: int) -> int:
    """The first `bits` bits of the SHA-256 as a number; 63 bits fit into an int64."""
    return int(digest(data), 16) >> (256 - bits)


def file_digest(path: Path) -> str:
    """The SHA-256 of a file's bytes, in 64 hex digits; the file is read in small pieces.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
