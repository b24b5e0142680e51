"""How large a program of the gate kernels is: from measurements of this GPU, or else by a rule.

A program has some rows of logits and some warps; which ones are fastest depends on the GPU, on the
kernel and on the shape. `tile_table.json`, beside this file, holds what `proof.benchmarks.tiles`
has measured, one entry for each kernel, shape and GPU:

    {"gpu": "NVIDIA H200", "kernel": "forward", "words": 4, "topk": 8, "dtype": "bfloat16",
     "rows": 8, "num_warps": 1, "measured": {...}}

E experts are rounded up to `words` of 32, because that is what a kernel is compiled for. For a
shape or a GPU without an entry `rule` says the tile. No entry is ever guessed: the table is empty
as long as no GPU was measured. The environment variable MEGATRON_R3_TILES names another table, for
example the one that a tuning has just written; it then takes the place of the table here.

The number of pipeline stages is not part of a tile: no loop of the kernels loads what the next
round needs, so Triton makes the same code for any number (tests/unit/replay/gate/test_compile.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

VARIABLE = "MEGATRON_R3_TILES"
SHIPPED = Path(__file__).with_name("tile_table.json")
KERNELS = ("forward", "backward")
DTYPES = ("bfloat16", "float16", "float32")
LOGITS = 1024  # of one program, by the rule: 32 for each lane of its warp
MAX_LOGITS = 8192  # more do not fit into the registers of the warps below
WARPS = (1, 2, 4, 8)


class Tile(NamedTuple):
    """The size of one program: its rows, a power of two, and its warps."""

    rows: int
    num_warps: int


class Shape(NamedTuple):
    """What a tile is chosen for.

    Attributes:
        kernel: "forward" or "backward".
        words: of 32 experts, for each row; a power of two.
        topk: experts of a row.
        dtype: of the logits, as "bfloat16".
    """

    kernel: str
    words: int
    topk: int
    dtype: str


Table = Mapping[tuple[str, Shape], Tile]  # by the name of the GPU and the shape


def words_of(num_experts: int) -> int:
    """Words of 32 experts, rounded up to a power of two. Example: 384 experts are 12, so 16."""
    return 1 << (-(-num_experts // 32) - 1).bit_length()


def rule(words: int) -> Tile:
    """The tile of a shape that was not measured: one warp, and about a thousand logits."""
    return Tile(max(1, LOGITS // (32 * words)), 1)


def tile_for(shape: Shape, device: torch.device) -> Tile:
    """The measured tile of a shape on this device, or that of the rule.

    Raises:
        ValueError: MEGATRON_R3_TILES names no table.
    """
    table = _table_of_environment() if _used is None else _used
    return table.get((gpu_name(device), shape)) or rule(shape.words)


@lru_cache
def gpu_name(device: torch.device) -> str:
    """The GPU's name as a table has it; "cpu" for Triton's interpreter."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def read_table(path: Path) -> dict[tuple[str, Shape], Tile]:
    """Read a table.

    Raises:
        ValueError: names the file and the entry, and says what it should be.
    """
    try:
        entries = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: no table of tiles: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: no JSON: {error}") from error
    if not isinstance(entries, list):
        raise ValueError(f"{path}: a list of entries, not {type(entries).__name__}")
    table: dict[tuple[str, Shape], Tile] = {}
    for number, entry in enumerate(entries):
        key, tile = _checked(entry, f"{path}: entry {number}")
        if key in table:
            raise ValueError(f"{path}: entry {number}: a second one for {key}")
        table[key] = tile
    return table


@contextmanager
def use_table(table: Table) -> Iterator[None]:
    """Have the kernels take their tiles from `table` until the block ends: the hook of the tuning.

    It holds for the whole process, so do not open two blocks in two threads.
    """
    global _used
    before, _used = _used, table
    try:
        yield
    finally:
        _used = before


_used: Table | None = None


@lru_cache
def _table_of_environment() -> Table:
    """Read once: a launch must not read files."""
    named = os.environ.get(VARIABLE)
    if named is None:
        return read_table(SHIPPED)
    try:
        return read_table(Path(named))
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={named}: {error}") from error


def _checked(entry: Any, place: str) -> tuple[tuple[str, Shape], Tile]:
    if not isinstance(entry, dict):
        raise ValueError(f"{place}: an object, not {type(entry).__name__}")
    names = ("gpu", *Shape._fields, *Tile._fields)
    missing = [name for name in (*names, "measured") if name not in entry]
    if missing:
        raise ValueError(f"{place}: without {', '.join(missing)}")
    shape = Shape(*(entry[name] for name in Shape._fields))
    tile = Tile(*(entry[name] for name in Tile._fields))
    whole = isinstance(tile.rows, int) and isinstance(shape.words, int)
    fits = whole and 0 < 32 * shape.words * tile.rows <= MAX_LOGITS
    wanted = {
        "kernel": (shape.kernel in KERNELS, f"one of {', '.join(KERNELS)}"),
        "words": (shape.words in (1, 2, 4, 8, 16, 32), "a power of two up to 32"),
        "topk": (shape.topk in range(1, 65), "1 to 64"),
        "dtype": (shape.dtype in DTYPES, f"one of {', '.join(DTYPES)}"),
        "rows": (
            fits and tile.rows.bit_count() == 1,
            f"a power of two, with 32 x words x rows up to {MAX_LOGITS}",
        ),
        "num_warps": (tile.num_warps in WARPS, f"one of {WARPS}"),
    }
    for name, (right, said) in wanted.items():
        if not right:
            raise ValueError(f"{place}: {name}: {said}, not {entry[name]!r}")
    return (entry["gpu"], shape), tile
