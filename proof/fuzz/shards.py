"""Tries on rollout shards: noise, forged values with right checksums, files swapped or lost.

A store that opens and verifies must give exactly what was written, read by rollout and by row. A
reader must refuse every other store with an error that names it.

Shape suffixes (docs/glossary.md): C, K, L, N, T, U, V.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import stored
from safetensors.numpy import load_file

from megatron_r3.cli import main as megatron_r3
from megatron_r3.data.kept import KeptSets
from megatron_r3.data.store import (
    Rollout,
    RolloutStore,
    SamplingSettings,
    StoreInfo,
    open_stores,
    write_shard,
)
from megatron_r3.data.store.verify_shard import ReadChecks
from megatron_r3.replay.routes import Routes
from proof.fuzz.damage import noise
from proof.fuzz.driver import Kind
from proof.fuzz.forgeries import VOCABULARY, forge, write_again
from proof.fuzz.outcome import BAD_MESSAGE, REFUSED, SILENT, Fault, bad_stderr, judged, note

# The modification time of a store's files, in seconds since 1970. It is long ago, so that a change
# of a file changes this time, even if the file system's clock is coarse.
_LONG_AGO = 1_700_000_000
_SCALARS = ("reward", "group", "sample", "policy_version", "prompt_digest", "advantage")
_WAYS = ("nothing", "written again", "files", "files", "while it is open", "while it is open",
         *["noise"] * 4, *["forged"] * 9)  # fmt: skip
_NAMES = (
    "shard-00000 (copy).safetensors", "shard-00000.bak.safetensors", "shard-00009.safetensors",
    "shard-000000.safetensors", "shard-0.safetensors", "shard-99999.safetensors",
    "shard-0000A.safetensors", "shard-00000.safetensors.bak", "shard--0001.safetensors",
    ".shard-abc.tmp", "shard-00001.safetensors~", "Shard-00001", "model.safetensors",
    "shard-00000.safetensors.safetensors", "shard-000000000000000000000001.safetensors",
)  # fmt: skip
# what may stand in a shard's place, and the target if it is a symbolic link
_ODD_FILES = {"a folder": "", "a pipe": "", "a link": "", "zeros": "/dev/zero",
              "a loop": "shard-00000.safetensors", "nowhere": "/nowhere/at all"}  # fmt: skip


@dataclass(frozen=True)
class Base:
    """A valid store, which tries copy and damage.

    Attributes:
        info: the store's info.
        files: the bytes of each shard, by its name.
        expected: the `contents` of the store.
        other: the shards of another valid store of the same model, with other rollouts.
    """

    info: StoreInfo
    files: dict[str, bytes]
    expected: dict[str, Any]
    other: dict[str, bytes]


def _rollout(info: StoreInfo, seed: int, group: int, sample: int) -> Rollout:
    """A random rollout with turns and missing rows; with `processed` log-probs, also kept sets."""
    rng = np.random.default_rng(seed)
    num_tokens = int(rng.choice((3, 6, 9, 12, 60, 65, 134)))
    rollout: Rollout = stored.make_rollout(num_tokens, seed, info.num_experts, group, sample=sample)
    recorded_T = rng.random(num_tokens - 1) > 0.1
    response_N = np.arange(num_tokens) >= rng.integers(1, num_tokens)
    if num_tokens > 8:  # several turns; token 4, between two of them, was not sampled
        response_N[3], response_N[4], response_N[5] = True, False, True
    rollout = replace(
        rollout,
        response_N=response_N,
        logprobs_N=np.where(response_N, -4 * rng.random(num_tokens), 0).astype(np.float32),
        routes=Routes.from_array(rollout.routes.ids_LTK, info.num_experts, recorded_T),
        prompt_digest=1 + group,
    )
    if not info.sampling.logprobs_of:
        return rollout
    first, last = np.flatnonzero(response_N)[[0, -1]].tolist()
    sets = [  # of 2 ids or more: a token that is alone in its set must have log-prob 0
        sorted({token, 60, 61}) if drawn else []
        for token, drawn in zip(rollout.tokens_N.tolist(), response_N.tolist(), strict=True)
    ]
    spans = [(first, 7), *([(last, 9)] if last > first else [])]
    versions_C2 = np.array(spans, np.int64)
    return replace(
        rollout, kept=KeptSets.from_lists(sets), versions_C2=versions_C2, advantage=0.5 * sample
    )


def _write(folder: Path, info: StoreInfo, shards: int, seed: int) -> dict[str, bytes]:
    for shard in range(shards):
        names = [(group, sample) for group in (2 * shard, 2 * shard + 1) for sample in range(2)]
        rollouts = [_rollout(info, seed + 9 * i + j, i, j) for i, j in names]
        write_shard(folder, info, rollouts)
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def prepare(shared: Path) -> list[Base]:
    """Stores of one to three shards, with one- or two-byte expert ids, and one with kept sets."""
    plain = SamplingSettings(1.0, 1.0, 0, 0.0, 16)
    cut = SamplingSettings(0.7, 0.9, 20, 0.0, 16, "processed")
    bare = replace(stored.INFO, sampling=plain, router_fingerprint=(), num_experts=300)
    full = replace(stored.INFO, sampling=plain, vocab_size=VOCABULARY)
    full = replace(full, policy_stamp="ab" * 8, engine_policy="step-3")
    bases = []
    kinds = ((full, 3), (full, 2), (bare, 1), (replace(full, sampling=cut), 2))
    for index, (info, shards) in enumerate(kinds):
        folder, elsewhere = shared / f"store{index}", shared / f"other{index}"
        files, other = _write(folder, info, shards, index), _write(elsewhere, info, shards, 100)
        bases.append(Base(info, files, contents(RolloutStore([folder])), other))
    return bases


def contents(store: RolloutStore, verify: bool = True) -> dict[str, Any]:
    """All that a training can read of a store, by rollout and by row id, in comparable form."""
    if verify:
        store.verify()
    found = {**asdict(store.info), "groups": store.groups(), "reward": store.column("reward")}
    for index in range(len(store)):
        rollout, fields = store.rollout(index), store.fields(index)
        rows = store.row_ids(index)
        ids_LTK, recorded_T = store.routes(rows, range(len(store.info.moe_layers)))
        by_row = store.kept_of_next(rows)
        kept = rollout.kept or KeptSets.none(len(rollout.tokens_N))
        # Reading by rollout and by row must agree. A missing row is 0 by rollout, and may be other
        # ids by row, so those are set to 0 too.
        pairs = (
            (rollout.tokens_N, fields["tokens"]),
            (rollout.response_N, fields["response"]),
            (rollout.logprobs_N, fields["logprobs"]),
            (rollout.routes.ids_LTK, np.where(recorded_T[:, None], ids_LTK, 0)),
            (kept.sizes_N[1:], by_row.sizes_N),
            (kept.ids_V, by_row.ids_V),
        )
        values = {
            **fields, "ids": ids_LTK, "recorded by row": recorded_T, "kept": kept.ids_V,
            "turns": rollout.spans_U2, "versions": store.versions(index),
            "both readings agree": all(np.array_equal(*pair) for pair in pairs),
        } | {name: getattr(rollout, name) for name in _SCALARS}  # fmt: skip
        found |= {f"{index}.{name}": value for name, value in values.items()}
    return {name: _comparable(value) for name, value in found.items()}


def _comparable(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return type(value), value


def difference(got: dict[str, Any], expected: dict[str, Any]) -> str | None:
    """The first difference of two contents, in words; None if they are equal."""
    for name in {**got, **expected}:
        if got.get(name) != expected.get(name):
            return f"{name} is {got.get(name)!r:.200}, not {expected.get(name)!r:.200}"
    return None


def attempt(rng: random.Random, folder: Path, bases: list[Base]) -> str:
    """Change a store, or its files while a reader has it open, and read all of it."""
    base, store = rng.choice(bases), folder / "store"
    store.mkdir()
    for name, data in base.files.items():
        (store / name).write_bytes(data)
        os.utime(store / name, (_LONG_AGO, _LONG_AGO))
    path, what = store / rng.choice([*base.files]), rng.choice(_WAYS)
    if what == "files":
        return _with_other_files(rng, folder, store, base)
    if what == "while it is open":
        return _while_open(rng, folder, store, base)
    must = what in ("nothing", "written again")
    if what == "written again":  # proves that a forged shard is not refused for how it was written
        write_again(path, base.info, load_file(path))
    elif what == "noise":
        data, what = noise(path.read_bytes(), rng)
        path.write_bytes(data)
    elif what == "forged":
        what = forge(path, base.info, rng)
    note(folder, f"{path.name}: {what}")
    outcome = _read(store, base, must)
    if rng.randrange(4) == 0:
        _by_command(store, outcome)
    return outcome


def _read(store: Path, base: Base, must: bool = False) -> str:
    return judged(
        lambda: contents(RolloutStore([store])),
        lambda got: difference(got, base.expected),
        [str(store)],
        must,
    )


def _with_other_files(rng: random.Random, folder: Path, store: Path, base: Base) -> str:
    what, directories, shorter = _change_files(rng, store, base)
    follow_s = 0.01 if len(directories) == 1 and rng.randrange(5) == 0 else None
    note(folder, f"files{' of a followed store' if follow_s else ''}: {what}")

    def wrong(got: dict[str, Any]) -> str | None:
        # a store that lost its last shard may be shorter; the rollouts that are left must be right
        kept = {k: v for k, v in got.items() if k[0].isdigit() or not (shorter or follow_s)}
        missing = () if not (shorter or follow_s) else base.expected.keys() - kept.keys()
        return difference(kept, {k: v for k, v in base.expected.items() if k not in missing})

    names = [str(directory) for directory in directories]
    return judged(lambda: contents(open_stores(directories, follow_s=follow_s)), wrong, names)


def _change_files(rng: random.Random, store: Path, base: Base) -> tuple[str, list[Path], bool]:
    """Change the files of a store in one way.

    Returns:
        What was done; the directories to read; and whether the last shard is gone, which leaves a
        valid, shorter store.
    """
    names = [*base.files]
    name, other = rng.choice(names), rng.choice(names)
    path, copy, elsewhere = store / name, store.with_name("copy"), store.with_name("elsewhere")
    last = name == names[-1] and len(names) > 1
    kind = rng.choice((*_ODD_FILES, "removed", "renamed", "copied", "swapped", "mixed", "twice"))
    if kind == "copied":
        odd_name = rng.choice([*_NAMES, f"shard-{len(names):05d}.safetensors"])
        shutil.copy2(path, store / odd_name)
        return f"{name} is copied to {odd_name}", [store], False
    if kind == "swapped" or kind == "mixed":
        path.write_bytes(base.files[other])
        if kind == "swapped":
            (store / other).write_bytes(base.files[name])
        return f"{name} and {other} are {kind}", [store], False
    if kind == "twice":
        if rng.choice((True, False)):
            shutil.copytree(store, copy, copy_function=rng.choice((shutil.copy2, os.link)))
        else:
            copy.symlink_to(store)
        return "the store is given twice, the second time a copy", [store, copy], False
    data = path.read_bytes()
    path.unlink()
    if kind == "renamed":
        odd_name = rng.choice([n for n in _NAMES if n.startswith("shard-")])
        # a reader finds this shard under none of these names, so the shard is lost
        (store / odd_name).write_bytes(data)
        kind = f"renamed to {odd_name}"
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a link":  # a link to a file with the same content is a valid shard
        elsewhere.write_bytes(data)
        path.symlink_to(elsewhere)
    elif kind in _ODD_FILES:
        path.symlink_to(_ODD_FILES[kind])
    return f"{name} is {kind}", [store], last and kind.startswith(("removed", "renamed"))


def _while_open(rng: random.Random, folder: Path, store: Path, base: Base) -> str:
    opened = RolloutStore([store])
    verified = rng.choice((True, False))
    if verified:  # a training verifies its store once, and then reads for hours
        opened.verify()
    if rng.choice((True, False)):  # a training checks the store's files once in a step
        opened.trained_on(ReadChecks() if rng.choice((True, False)) else None)
    if rng.choice((True, False)):  # the reader keeps the files open from here on
        for rollout in range(len(opened)):
            opened.routes(opened.row_ids(rollout)[:1], [0])
    note(folder, f"while it is open: {_change_open(rng, store, base)}")
    return judged(
        lambda: contents(opened, verify=not verified),
        lambda got: difference(got, base.expected),
        [str(store)],
    )


def _change_open(rng: random.Random, store: Path, base: Base) -> str:
    """Change the files of a store that a reader has open, in one way; return what was done."""
    name = rng.choice([*base.files])
    path, data = store / name, base.files[name]
    kind = rng.choice(("replaced", "cut", "written over", "removed", "all removed", "all others",
                       "touched"))  # fmt: skip
    if kind == "replaced":
        (store / ".beside").write_bytes(base.other[name])
        os.replace(store / ".beside", path)
    elif kind == "cut":
        os.truncate(path, rng.choice((0, 8, rng.randrange(len(data)), len(data) - 1)))
    elif kind == "written over":
        where = rng.randrange(8 + int.from_bytes(data[:8], "little"), len(data))
        with path.open("r+b") as file:
            file.seek(where)
            file.write(rng.randbytes(rng.randint(1, min(1000, len(data) - where))))
        kind += f" from byte {where} on"
    elif kind == "removed":
        path.unlink()
    elif kind == "all removed":
        shutil.rmtree(store)
    elif kind == "all others":
        for other, bytes_of_it in base.other.items():
            (store / other).write_bytes(bytes_of_it)
    else:
        os.utime(path)
    return f"{name} is {kind}"


def _by_command(store: Path, outcome: str) -> None:
    """Raise a Fault unless `rollouts verify` agrees with the outcome and prints clean lines.

    `rollouts inspect` may accept or refuse the store, and must print clean lines too.
    """
    for command, wanted in (("verify", int(outcome == REFUSED)), ("inspect", None)):
        out, error = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            status = megatron_r3(["rollouts", command, str(store)])
        if wanted is not None and status != wanted:
            raise Fault(SILENT, f"{command} ends with {status}; reading the store: {outcome}")
        wrong = bad_stderr(error.getvalue(), [str(store)]) if status else None
        if not status and not out.getvalue().replace("\n", "").isprintable():
            wrong = f"its output has characters that are not printable: {out.getvalue()!a}"
        if wrong is not None:
            raise Fault(BAD_MESSAGE, f"{command}: {wrong}")


KIND = Kind("shards", attempt, prepare)
