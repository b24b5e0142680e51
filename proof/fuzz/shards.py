"""Tries on rollout shards: noise, forged values with right checksums, files swapped or lost.

A store that opens and verifies must give exactly what was written, read rollout by rollout and row
by row. Everything else must be an error that names the store.

Shape suffixes (docs/glossary.md): C, E, K, L, N, T, U, V.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

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
from proof.fuzz import shard_bytes, store_files
from proof.fuzz.outcome import (
    BAD_MESSAGE,
    REFUSED,
    RIGHT,
    SILENT,
    Kind,
    Verdict,
    bad_line,
    judged,
    note,
)
from proof.fuzz.shard_extras import VOCABULARY
from proof.fuzz.shard_parts import ShardFile
from proof.fuzz.store_files import Base

# Seconds since 1970: what the files of a store say when they were written. Every change to such a
# file shows in its time, also where the clock of the file system is coarse.
_LONG_AGO = 1_700_000_000


def _info(experts: int, topk: int, layers: tuple[int, ...], stamped: bool) -> StoreInfo:
    return StoreInfo(
        num_experts=experts,
        topk=topk,
        moe_layers=layers,
        engine="vllm",
        engine_version="0.30.0",
        model="tiny",
        router_fingerprint=tuple(f"{layer:016x}" for layer in layers) if stamped else (),
        policy_stamp="ab" * 8 if stamped else "",
        engine_policy="step-3" if stamped else "",
        vocab_size=VOCABULARY if stamped else 0,
        sampling=SamplingSettings(1.0, 1.0, 0, 0.0, 16),
    )


def _rollout(info: StoreInfo, rng: np.random.Generator, group: int, sample: int) -> Rollout:
    num_tokens = int(rng.integers(3, 13) if rng.random() < 0.8 else rng.integers(60, 135))
    shape = (len(info.moe_layers), num_tokens - 1)
    ids_LTK = rng.random((*shape, info.num_experts)).argsort(-1)[..., : info.topk]
    recorded_T = rng.random(num_tokens - 1) > 0.1
    response_N = np.arange(num_tokens) >= rng.integers(1, num_tokens)
    if num_tokens > 8:  # two turns, with a token between them that was given
        response_N[3], response_N[4], response_N[5] = True, False, True
    rollout = Rollout(
        tokens_N=rng.integers(0, VOCABULARY, num_tokens).astype(np.int32),
        response_N=response_N,
        logprobs_N=np.where(response_N, -4 * rng.random(num_tokens), 0).astype(np.float32),
        reward=float(np.float32(rng.normal())),
        group=group,
        policy_version=7,
        routes=Routes.from_array(ids_LTK, info.num_experts, recorded_T),
        sample=sample,
        prompt_digest=1 + group,
    )
    return _with_extras(rollout, rng) if info.sampling.logprobs_of else rollout


def _with_extras(rollout: Rollout, rng: np.random.Generator) -> Rollout:
    """The rollout with kept sets, two policy versions and an advantage."""
    drawn = zip(rollout.response_N.tolist(), rollout.tokens_N.tolist(), strict=True)
    sets = [
        sorted({own, *rng.choice(np.delete(np.arange(VOCABULARY), own), 3).tolist()}) if new else []
        for new, own in drawn
    ]
    first, last = np.flatnonzero(rollout.response_N)[[0, -1]].tolist()
    spans = [(first, 7), *([(last, 9)] if last > first else [])]
    return replace(
        rollout,
        kept=KeptSets.from_lists(sets),
        versions_C2=np.array(spans, np.int64),
        advantage=float(np.float32(rng.normal())),
    )


def _write(folder: Path, info: StoreInfo, shards: int, seed: int) -> dict[str, bytes]:
    rng = np.random.default_rng(seed)
    for shard in range(shards):
        groups = range(2 * shard, 2 * shard + 2)
        rollouts = [_rollout(info, rng, group, sample) for group in groups for sample in range(2)]
        write_shard(folder, info, rollouts)
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def prepare(shared: Path) -> list[Base]:
    """Stores of one to three shards, of one- and two-byte ids, of both versions, with extras."""
    small = _info(16, 4, (1, 2, 5), stamped=True)
    wide = _info(300, 2, (0,), stamped=False)
    cut = replace(small, sampling=SamplingSettings(0.7, 0.9, 20, 0.0, 16, "processed"))
    bases = []
    for index, (info, shards) in enumerate(((small, 3), (small, 2), (wide, 1), (cut, 2))):
        folder, elsewhere = shared / f"store{index}", shared / f"other{index}"
        files, other = (
            _write(f, info, shards, s) for f, s in ((folder, index), (elsewhere, index + 100))
        )
        bases.append(Base(files, contents(RolloutStore([folder])), other, numbered=True))
    return [*bases, _version_2(bases[0], shared / "old")]


def _version_2(base: Base, folder: Path) -> Base:
    """The same rollouts, written as version 2: they read the same, but for what is new since."""
    files = {name: ShardFile.of(data).as_version_2() for name, data in base.files.items()}
    other = {name: ShardFile.of(data).as_version_2() for name, data in base.other.items()}
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    got = contents(RolloutStore([folder]))
    kept = {k for k in got if not k.startswith("info.") and not k.endswith("prompt_digest")}
    assert difference({k: base.expected[k] for k in kept}, {k: got[k] for k in kept}) is None
    return Base(files, got, other, numbered=False)


def contents(store: RolloutStore, verify: bool = True) -> dict[str, Any]:
    """All that training can read of a store: by rollout, and by row id."""
    if verify:
        store.verify()
    result: dict[str, Any] = {f"info.{k}": v for k, v in asdict(store.info).items()}
    layers = range(len(store.info.moe_layers))
    for index in range(len(store)):
        rollout, fields = store.rollout(index), store.fields(index)
        ids_LTK, recorded_T = store.routes(store.row_ids(index), layers)
        result |= {f"{index}.{name}": value for name, value in fields.items()}
        result |= {f"{index}.ids": ids_LTK, f"{index}.recorded by row": recorded_T}
        for name in ("reward", "group", "sample", "policy_version", "prompt_digest"):
            result[f"{index}.{name}"] = getattr(rollout, name)
        result[f"{index}.turns"] = rollout.spans_U2
        result |= _extras(store, index, rollout)
        # Both ways of reading give the same. A row without recorded routes has ids of its own
        # in each of them, so that only recorded rows are compared.
        pairs = (
            (rollout.tokens_N, fields["tokens"]),
            (rollout.response_N, fields["response"]),
            (rollout.logprobs_N, fields["logprobs"]),
            (rollout.routes.ids_LTK, np.where(recorded_T[:, None], ids_LTK, 0)),
        )
        for by_rollout, by_row in pairs:
            result[f"{index}.two readings agree"] = np.array_equal(by_rollout, by_row)
    loads = [load_LE for shard in store.shards for load_LE in shard.expert_load()]
    result |= {f"{index}.load": load_LE for index, load_LE in enumerate(loads)}
    result["groups"] = store.groups()
    result["reward"] = store.column("reward")
    return result


def _extras(store: RolloutStore, index: int, rollout: Rollout) -> dict[str, Any]:
    by_row = store.kept_of_next(store.row_ids(index))
    kept = rollout.kept or KeptSets.from_lists([[]] * len(rollout.tokens_N))
    return {
        f"{index}.kept sizes": kept.sizes_N,
        f"{index}.kept ids": kept.ids_V,
        f"{index}.kept by row agree": np.array_equal(by_row.sizes_N, kept.sizes_N[1:])
        and np.array_equal(by_row.ids_V, kept.ids_V),
        f"{index}.versions": store.versions(index),
        f"{index}.advantage": rollout.advantage,
    }


def difference(got: dict[str, Any], expected: dict[str, Any]) -> str | None:
    """Where two contents differ, or None."""
    if got.keys() != expected.keys():
        odd = sorted(got.keys() ^ expected.keys())
        return f"it has {len(odd)} fields more or less than it must, {odd[0]} the first"
    for name, wanted in expected.items():
        value = got[name]
        if isinstance(wanted, np.ndarray):
            same = isinstance(value, np.ndarray) and value.dtype == wanted.dtype
            same = same and value.shape == wanted.shape and value.tobytes() == wanted.tobytes()
        else:
            same = type(value) is type(wanted) and value == wanted
        if not same:
            return f"{name} is {value!r:.200}, not {wanted!r:.200}"
    return None


def attempt(rng: random.Random, folder: Path, bases: list[Base]) -> Verdict:
    """Change a store, or its files while it is open, then read all of it."""
    base, store = rng.choice(bases), folder / "store"
    store.mkdir()
    for name, data in base.files.items():
        (store / name).write_bytes(data)
        os.utime(store / name, (_LONG_AGO, _LONG_AGO))
    chance = rng.random()
    if chance < 0.02:
        note(folder, "nothing is changed")
        return _read(store, base, must=True)
    if chance < 0.04:  # control: a forged shard is not refused merely since ShardFile wrote it
        name = rng.choice([*base.files])
        (store / name).write_bytes(ShardFile.of(base.files[name]).file())
        note(folder, "put together again")
        return _read(store, base, must=True)
    if chance < 0.3:
        name = rng.choice([*base.files])
        data, what = shard_bytes.changed_bytes(base.files[name], rng)
        (store / name).write_bytes(data)
    elif chance < 0.8:
        name = rng.choice([*base.files])
        data, what = shard_bytes.forged(base.files[name], rng)
        (store / name).write_bytes(data)
    elif chance < 0.9:
        return _with_other_files(rng, folder, store, base)
    else:
        return _while_open(rng, folder, store, base)
    note(folder, what)
    verdict = _read(store, base)
    return _by_command(store, verdict) if rng.random() < 0.25 else verdict


def _read(store: Path, base: Base, must: bool = False) -> Verdict:
    return judged(
        lambda: contents(RolloutStore([store])),
        lambda got: difference(got, base.expected),
        [str(store)],
        must,
    )


def _with_other_files(rng: random.Random, folder: Path, store: Path, base: Base) -> Verdict:
    what, directories, change = store_files.change(rng, store, base)
    follow_s = 0.01 if not directories and rng.random() < 0.2 else None
    note(folder, f"files{' of a followed store' if follow_s else ''}: {what}")
    directories = directories or [store]

    def wrong(got: dict[str, Any]) -> str | None:
        if change == "shorter" or follow_s:  # what is left must be right, and may be shorter
            kept = {key: value for key, value in got.items() if key[0].isdigit()}
            return difference(kept, {k: v for k, v in base.expected.items() if k in kept})
        return difference(got, base.expected)

    return judged(
        lambda: contents(open_stores(directories, follow_s=follow_s)),
        wrong,
        [str(directory) for directory in directories],
    )


def _while_open(rng: random.Random, folder: Path, store: Path, base: Base) -> Verdict:
    opened = RolloutStore([store])
    verified = rng.random() < 0.5
    if verified:  # a training verifies its store once, and then reads for hours
        opened.verify()
    if rng.random() < 0.5:  # and looks at its files once in a step, not after each read
        opened.trained_on(ReadChecks() if rng.random() < 0.5 else None)
    for shard in (
        opened.shards if rng.random() < 0.3 else ()
    ):  # the reader keeps what it opened here
        shard.read_routes(np.arange(min(1, shard.num_rows)), [0])
    note(folder, f"while it is open: {store_files.change_open(rng, store, base)}")
    return judged(
        lambda: contents(opened, verify=not verified),
        lambda got: difference(got, base.expected),
        [str(store)],
    )


def _by_command(store: Path, verdict: Verdict) -> Verdict:
    """Whether `rollouts verify` agrees with the verdict, and `inspect` prints clean lines."""
    if verdict.outcome not in (RIGHT, REFUSED):
        return verdict
    for command, wanted in (("verify", int(verdict.outcome == REFUSED)), ("inspect", None)):
        out, error = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            status = megatron_r3(["rollouts", command, str(store)])
        said = error.getvalue().removesuffix("\n")
        if wanted is not None and status != wanted:
            return Verdict(SILENT, f"{command} ends with {status}; reading it: {verdict}")
        wrong = bad_line(said, [str(store)]) if status else None
        if wrong is None and status and not said.startswith("error: "):
            wrong = "no `error:` before it"
        if wrong is None and not status and not out.getvalue().replace("\n", "").isprintable():
            wrong, said = "its output has characters that are not printable", out.getvalue()
        if wrong is not None:
            return replace(verdict, outcome=BAD_MESSAGE, detail=f"{command}: {wrong}: {said!a}")
    return verdict


KIND = Kind("shards", 420, 30.0, 1024, prepare, attempt)
