"""What may happen to the files of a store: lost, copied, renamed, swapped, changed while open."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAMES = (
    "shard-00000 (copy).safetensors", "shard-00000.bak.safetensors", "shard-00009.safetensors",
    "shard-000000.safetensors", "shard-0.safetensors", "shard-99999.safetensors",
    "shard-0000A.safetensors", "shard-00000.safetensors.bak", "shard--0001.safetensors",
    "shard-00003.safetensors", ".shard-abc.tmp", "shard-00001.safetensors~", "Shard-00001",
    "shard-00000.safetensors.safetensors", "shard-000000000000000000000001.safetensors",
    "model.safetensors",
)  # fmt: skip


@dataclass(frozen=True)
class Base:
    """A whole store, which a try copies and then damages.

    Attributes:
        files: the bytes of each shard, by its name.
        expected: what a reader must find in the store (`shards.contents`).
        other: the shards of a valid store with other rollouts of the same model, as many.
        numbered: whether a shard says which number it has, as shards do from version 3 on.
    """

    files: dict[str, bytes]
    expected: dict[str, Any]
    other: dict[str, bytes]
    numbered: bool


def change(rng: random.Random, store: Path, base: Base) -> tuple[str, list[Path], str]:
    """Do one thing to the files of a store.

    Returns:
        What was done; the directories to read, if it is not the store alone; and "shorter" if the
        store now is one that has merely not grown so far, or else an empty text.
    """
    names = [*base.files]
    name = rng.choice(names)
    path = store / name
    kind = rng.choice(("remove", "copy", "rename", "swap", "twice", "odd", "mixed", "empty"))
    if kind == "remove":
        path.unlink()
        last = name == names[-1] and len(names) > 1
        return f"{name} is removed", [], "shorter" if last else ""
    if kind == "copy":
        copy = rng.choice([*_NAMES, f"shard-{len(names):05d}.safetensors"])
        shutil.copy2(path, store / copy)
        return f"{name} is copied to {copy}", [], ""
    if kind == "rename":
        other = rng.choice([n for n in _NAMES if n.startswith("shard-")])
        last = name == names[-1] and len(names) > 1
        os.rename(path, store / other)
        # a reader does not take a file with such a name for a shard, so the shard is lost
        return f"{name} is renamed to {other}", [], "shorter" if last else ""
    if kind == "swap" and len(names) > 1 and base.numbered:
        one, other = rng.sample(names, 2)
        (store / one).write_bytes(base.files[other])
        (store / other).write_bytes(base.files[one])
        return f"{one} and {other} are swapped", [], ""
    if kind == "twice":
        copy = store.with_name("copy")
        shutil.copytree(store, copy, copy_function=rng.choice((shutil.copy2, os.link)))
        if rng.random() < 0.3:
            shutil.rmtree(copy)
            copy.symlink_to(store)
        return "the store is given twice, the second time a copy", [store, copy], ""
    if kind == "mixed" and len(names) > 1:
        one, other = rng.sample(names, 2)
        (store / one).write_bytes(base.files[other])
        return f"{one} is a copy of {other}", [], ""
    if kind == "empty":
        path.write_bytes(rng.choice((b"", b"\0" * 8, b"\x02" + b"\0" * 7 + b"{}", b"PK\3\4")))
        return f"{name} is nearly empty", [], ""
    path.unlink()
    what = rng.choice(("folder", "pipe", "zeros", "loop", "nowhere", "link"))
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "link":  # a link to a file with the same content is no fault
        store.with_name("elsewhere").write_bytes(base.files[name])
        path.symlink_to(store.with_name("elsewhere"))
    else:
        path.symlink_to({"zeros": "/dev/zero", "loop": name, "nowhere": "/nowhere/at all"}[what])
    return f"{name} is a {what}", [], ""


def change_open(rng: random.Random, store: Path, base: Base) -> str:
    """Do one thing to the files of a store that a reader has opened; return what was done."""
    name = rng.choice([*base.files])
    path, data = store / name, base.files[name]
    kind = rng.choice(("replace", "cut", "overwrite", "remove", "remove all", "other", "touch"))
    if kind == "replace":
        beside = store / ".beside"
        beside.write_bytes(base.other[name])
        os.replace(beside, path)
        return f"{name} is replaced by that of another store"
    if kind == "cut":
        length = rng.choice((0, 8, len(data) // 2, rng.randrange(len(data)), len(data) - 1))
        os.truncate(path, length)
        return f"{name} is cut to {length} of {len(data)} bytes"
    if kind == "overwrite":
        begin = 8 + int.from_bytes(data[:8], "little")
        where = rng.randrange(begin, len(data))
        count = rng.randint(1, len(data) - where)
        with path.open("r+b") as file:
            file.seek(where)
            file.write(rng.randbytes(count))
        return f"{count} bytes of {name} are written over, from {where} on"
    if kind == "remove":
        path.unlink()
        return f"{name} is removed"
    if kind == "remove all":
        shutil.rmtree(store)
        return "the store is removed"
    if kind == "other":
        for other, bytes_of_it in base.other.items():
            (store / other).write_bytes(bytes_of_it)
        return "all shards are written over by another store's"
    os.utime(path)
    return f"{name} is touched"
