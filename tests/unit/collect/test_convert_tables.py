"""Tables that somebody else made: one line that names file, column and row.

Shape suffixes (docs/glossary.md): K, L, T.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tracemalloc
from dataclasses import fields, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stored import GROUPED_ROLLOUTS, INFO

from megatron_r3.cli import main
from megatron_r3.data.store import RolloutStore, write_shard
from megatron_r3.data.store.schema import SamplingSettings
from megatron_r3.replay.routes import Routes
from tests.unit.collect.test_convert import back
from tests.unit.collect.test_convert_hostile import error_of


def table() -> pa.Table:
    return pq.read_table("r.parquet")


def with_column(name: str, values: Any, kind: pa.DataType | None = None) -> pa.Table:
    given = table()
    column = pa.array(values, kind)
    return given.set_column(given.schema.get_field_index(name), name, column)


NO_TABLE = "not readable as a table of rollouts ("
WRONG_COLUMNS: dict[str, tuple[str, Any, Any, str]] = {
    "a list": ("sample", [[0]] * 5, None, NO_TABLE),
    "a fraction": ("policy_version", [7.5] * 5, None, NO_TABLE),
    "nothing": ("group", [None] * 5, pa.null(), "row 0 has no group"),
    "a null": ("group", [0, None, 1, 1, 2], pa.int64(), "row 1 has no group"),
    "a text as reward": ("reward", ["one"] * 5, None, NO_TABLE),
    "nested": ("reward", [{"a": [1]}] * 5, None, NO_TABLE),
    "a time": ("reward", [0] * 5, pa.timestamp("s"), NO_TABLE),
    "a huge decimal": (
        "reward", [Decimal(10) ** 70] * 5, pa.decimal256(76, 0), "row 0, policy_version 7, group 0",
    ),
    "not finite": ("reward", [1, 2, 3, 4, float("inf")], None, "row 4, policy_version 7, group 2"),
    "above 64 bits": ("group", [2**64 - 1] * 5, pa.uint64(), NO_TABLE),
    "texts as tokens": ("tokens", [["a"]] * 5, None, NO_TABLE),
    "numbers as tokens": ("tokens", [1] * 5, None, NO_TABLE),
    "nulls among tokens": ("tokens", [[1, None]] * 5, None, "row 0, policy_version 7, group 0"),
    "nulls for tokens": (
        "tokens", [None] * 5, pa.list_(pa.int32()), "row 0, policy_version 7, group 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_COLUMNS)
def test_tables_of_other_types(store, capsys, what):
    name, values, kind, message = WRONG_COLUMNS[what]
    assert back(with_column(name, values, kind)) == 1
    error = error_of(capsys)
    assert error.startswith("new.parquet: ")
    assert message in error
    assert not Path("new").exists()


def test_numbers_of_other_widths_and_truths_are_rewards(store, capsys):
    for values, kind in (
        ([1, 0, 1, 1, 0], pa.int8()),
        ([True] * 5, None),
        ([Decimal(2)] * 5, None),
    ):
        assert back(with_column("reward", values, kind), "new") == 0
        assert RolloutStore(["new"]).column("reward").tolist() == [float(v) for v in values]
        shutil.rmtree("new")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.slice(0, 4), "no row for store/shard-00001.safetensors: rollout 2, which is"),
        (
            lambda t: pa.concat_tables([t, t.slice(0, 1)]),
            "rows 0 and 5 are both policy_version 7, group 0, sample 0",
        ),
        (lambda t: t.drop_columns(["sample", "reward"]), "no column sample, reward"),
        (lambda t: with_column("reward", [1.0] * 4 + [None]), "has reward None; a reward is a"),
        (
            lambda t: with_column("tokens", [[1, 2]] * 5),
            "row 0, policy_version 7, group 0, sample 0, has other tokens",
        ),
        (lambda t: t.append_column("group", t["sample"]), NO_TABLE),
        (
            lambda t: with_column("sample", [0, 9, 0, 1, 0]),
            "row 1: store has no rollout policy_version 7, group 0, sample 9",
        ),
    ],
)
def test_tables_of_something_else_are_refused(store, capsys, change, message):
    there = {path.name for path in store.iterdir()} | {"new.parquet"}
    assert back(change(table())) == 1
    assert message in error_of(capsys)
    assert {path.name for path in store.iterdir()} == there


@pytest.mark.parametrize(
    "data",
    [b"", b"PAR1", b"group,sample\n0,0\n", "PAR1 and more, PAR1".encode("utf-16"), b"PAR1" * 999],
)
def test_files_that_are_no_tables(store, capsys, data):
    Path("new.parquet").write_bytes(data)
    arguments = ["new.parquet", "--store", "store", "--out", "new"]
    assert main(["rollouts", "convert", "from-parquet", *arguments]) == 1
    assert error_of(capsys).startswith(f"new.parquet: {NO_TABLE}")
    assert main(["rollouts", "convert", "from-parquet", "store", *arguments[1:]]) == 1
    assert error_of(capsys).startswith(f"store: {NO_TABLE}")


def test_rows_without_end_are_not_unpacked(store, capsys):
    """A million rows of one rollout: some kilobytes."""
    rows = {name: pa.array(np.full(10**6, 7)) for name in ("policy_version", "group", "sample")}
    pq.write_table(pa.table(rows | {"reward": rows["group"]}), "new.parquet")
    del rows
    assert Path("new.parquet").stat().st_size < 1 << 20
    tracemalloc.start()
    arguments = ["new.parquet", "--store", "store", "--out", "new"]
    assert main(["rollouts", "convert", "from-parquet", *arguments]) == 1
    message = "row 0: store has no rollout policy_version 7, group 7, sample 7"
    assert error_of(capsys) == f"new.parquet: {message}"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


MUTATE = r"""
import random, sys
from pathlib import Path
from megatron_r3.collect.parquet import from_parquet
whole, rng = Path("r.parquet").read_bytes(), random.Random("tables")
refused = same = 0
for round_ in range(int(sys.argv[1])):
    data = bytearray(whole)
    for _ in range(rng.choice((1, 1, 4))):
        where, kind = rng.randrange(len(data)), rng.randrange(4)
        if kind == 0:
            data[where] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[where] = rng.randrange(256)
        elif kind == 2:
            del data[where : where + rng.choice((1, 8, 200))]
        else:
            data[where : where + 4] = rng.choice((b"\xff" * 4, bytes(4), b"\xff\xff\xff\x7f"))
    Path("wrong.parquet").write_bytes(data)
    out = Path(f"new-{round_}")
    try:
        from_parquet(Path("wrong.parquet"), Path("store"), out)
    except ValueError as error:
        refused += 1
        text = str(error)
        assert text.startswith("wrong.parquet: ") and text.isprintable(), (round_, text)
        assert len(text) < 600 and not out.exists(), (round_, text)
    else:
        same += 1
print(refused, same)
"""


def test_mutated_tables(store):
    """In a process of its own, which pyarrow must not end. A reward may change: no checksum."""
    done = subprocess.run(
        [sys.executable, "-c", MUTATE, "200"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    refused, same = map(int, done.stdout.split())
    assert refused > 50
    assert same > 5


def test_a_rewritten_store_keeps_everything_but_the_rewards(folder):
    """Every field of a rollout and of the store's info that there is, and will be."""
    recorded = np.arange(8) % 3 > 0
    routes = Routes.from_array(GROUPED_ROLLOUTS[1].routes.ids_LTK, 16, recorded)
    old = [
        replace(GROUPED_ROLLOUTS[0], prompt_digest=2**62 + 1),
        replace(GROUPED_ROLLOUTS[1], routes=routes, prompt_digest=5, group=-3, policy_version=8),
    ]
    info = replace(
        INFO,
        policy_stamp="ab" * 8,
        engine_policy="v 7",
        vocab_size=512,
        sampling=SamplingSettings(1.0, 1.0, 0, None, 40),
    )
    write_shard(folder / "store", info, old)
    assert main(["rollouts", "convert", "to-parquet", "store", "--out", "r.parquet"]) == 0
    assert back(with_column("reward", [5.0, 6.0])) == 0
    before, after = RolloutStore(["store"]), RolloutStore(["new"])
    assert after.info == before.info == info
    for index in range(2):
        a, b = before.rollout(index), after.rollout(index)
        assert b.reward == 5.0 + index
        for field in fields(a):
            if field.name == "routes":
                assert np.array_equal(a.routes.ids_LTK, b.routes.ids_LTK)
                assert np.array_equal(a.routes.recorded_T, b.routes.recorded_T)
            elif field.name != "reward":
                assert np.array_equal(getattr(a, field.name), getattr(b, field.name)), field.name


def test_tables_that_cannot_be_written(store, capsys):
    Path("file").write_text("")
    Path("folder").mkdir()
    there = sorted(p.name for p in store.iterdir())
    for out, message in (
        ("file/r.parquet", f"file/r.parquet: cannot be written ({store / 'file'} is no directory)"),
        ("folder", "folder: cannot be written (Is a directory)"),
    ):
        assert main(["rollouts", "convert", "to-parquet", "store", "--out", out]) == 1
        assert error_of(capsys) == message
    assert sorted(p.name for p in store.iterdir()) == there
