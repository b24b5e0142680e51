"""The names of shards: `shard-NNNNN.safetensors`, numbered 0, 1, 2 ... without a gap.

The number of a shard stands in its name and, from format version 3 on, in its header. So a shard
that was copied, renamed or lost in between is noticed.
"""

from __future__ import annotations

import re
from pathlib import Path

from megatron_r3.store.schema import StoreError

__all__ = ["SHARD_GLOB", "listed_shards", "shard_name", "shard_number", "shards_in_order"]

SHARD_GLOB = "shard-[0-9]*.safetensors"
# one number has one name: 7 is 00007, never 000007
_NAME = re.compile(r"shard-([0-9]{5}|[1-9][0-9]{5,8})\.safetensors")


def shard_name(number: int) -> str:
    """The name of a shard's file."""
    return f"shard-{number:05d}.safetensors"


def shard_number(path: Path) -> int:
    """The number in the name of a shard's file.

    Raises:
        StoreError: it is not the name of a shard.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise StoreError(
            f"{path}: not the name of a shard ({shard_name(0)}, {shard_name(1)}, ...): give the "
            "file its own name again, or move it out of the store"
        )
    return int(match[1])


def listed_shards(directory: Path) -> dict[int, Path]:
    """The shards of a directory by number, in the order of their numbers.

    Raises:
        StoreError: a safetensors file has another name: which rollouts it holds is not known.
    """
    shards = {shard_number(path): path for path in directory.glob("*.safetensors")}
    return dict(sorted(shards.items()))


def shards_in_order(directory: Path) -> list[Path]:
    """The shards of a directory that nobody writes to: each from number 0 on.

    Raises:
        StoreError: a file of another name, or a number that is missing.
    """
    shards = listed_shards(directory)
    for expected, path in enumerate(shards.values()):
        if expected not in shards:
            raise StoreError(
                f"{directory / shard_name(expected)}: is missing, though {path.name} is there: "
                "copy the missing shard again"
            )
    return [*shards.values()]
