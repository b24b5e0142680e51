"""Floors: what is normal for a model and an engine, as the first collection measured it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_r3.data.truth.mismatch_tables import Tables
from megatron_r3.data.untrusted import read_json
from megatron_r3.data.whole_file import write_whole
from megatron_r3.replay.words import one_line

FORMAT = 2
_MOST_BYTES = 1 << 22


class FloorError(ValueError):
    """A file that holds no floor, or cannot be written; the message names it."""


@dataclass(frozen=True)
class Floor:
    """What the first collection of a model measured.

    Attributes:
        model: the model, as `floor_path` takes it.
        engine, engine_version: what sampled.
        dtype: in which the live routes were computed.
        version: the newest policy version of that collection.
        rows: how many rows were compared.
        tables: what was measured of that version.
    """

    model: str
    engine: str
    engine_version: str
    dtype: str
    version: int
    rows: int
    tables: Tables

    def to_json(self) -> dict[str, Any]:
        """The content of the floor's file."""
        return {"format": FORMAT, **asdict(self)}


def floor_path(store: Path, model: str, engine: str, dtype: str) -> Path:
    """Where the floor of the stores in a folder lies: each model, engine and dtype has its own.

    Example: runs/rollouts, "qwen3_moe 4x16 top-4", "vllm", "bfloat16" give
    runs/floors/qwen3_moe-4x16-top-4-vllm-bfloat16.json.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{model}-{engine}-{dtype}").strip("-.")[:200]
    return store.absolute().parent / "floors" / f"{name}.json"


def read_floor(path: Path) -> Floor | None:
    """The floor in a file; None if there is no file.

    Raises:
        FloorError: the file cannot be read, or holds something else.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FloorError(f"{path}: the floor cannot be read: {error.strerror}") from error
    try:
        value = read_json(data, str(path), _MOST_BYTES)
        if value["format"] != FORMAT:
            raise ValueError(f"format {value['format']}; this version reads format {FORMAT}")
        return Floor(
            model=str(value["model"]),
            engine=str(value["engine"]),
            engine_version=str(value["engine_version"]),
            dtype=str(value["dtype"]),
            version=int(value["version"]),
            rows=int(value["rows"]),
            tables=Tables.from_json(value["tables"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = one_line(f"{type(error).__name__}: {error}", 200)
        raise FloorError(
            f"{path}: is no floor ({reason}): remove it, and the next collection writes a new one"
        ) from error


def write_floor(path: Path, floor: Floor) -> bool:
    """Write a floor, whole or not at all. The first one stays.

    Returns:
        Whether it was written; False if there is one.

    Raises:
        FloorError: it cannot be written there.
    """
    try:
        write_whole(path, json.dumps(floor.to_json(), indent=1) + "\n", replaces=False)
    except FileExistsError:
        return False
    except OSError as error:
        raise FloorError(f"{path}: the floor cannot be written: {error.strerror}") from error
    return True
