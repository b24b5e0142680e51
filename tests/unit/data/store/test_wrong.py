"""Wrong stores, read in every way: every rollout is what was written, or one line names the file.

tests/support/wrongs.py lists what can be wrong. A store here is wrong before it is opened, or
becomes wrong while it is open.
"""

import shutil

import numpy as np
import pytest
from wrongs import (
    CUT,
    FIRST,
    IN_FILE,
    RIGHT,
    TABLES,
    WAYS,
    WRONGS,
    judged,
    place_of,
    refusals,
    right_store,
    told,
    verified,
)

from megatron_r3.data.store import StoreError, write_shard
from megatron_r3.data.values import wrong_count


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    return right_store(tmp_path_factory.mktemp("right") / "s")


@pytest.fixture
def folder(right, tmp_path):
    return shutil.copytree(right, tmp_path / "s")


@pytest.mark.parametrize("way", WAYS)
def test_the_store_that_is_right_is_read_as_it_was_written(folder, way):
    """Control: a right store is not refused."""
    assert judged(folder, way) == ""


@pytest.mark.parametrize("name", WRONGS)
def test_a_wrong_store_is_refused_whoever_reads_it(folder, name):
    change, message = WRONGS[name]
    change(folder / FIRST)
    for way in WAYS:
        line = judged(folder, way)
        assert line, way
        assert not message or line.startswith(f"{folder / FIRST}: {message}"), (way, line)


IN_USE = [n for n in WRONGS if n.startswith(("a bit", "a byte", "cut", "noise", "value", "an exp"))]


@pytest.mark.parametrize("name", IN_USE)
def test_a_store_that_becomes_wrong_while_it_is_open(folder, tmp_path, name):
    """The bytes of an open file change: each read of changed bytes is refused."""
    path, copy = folder / FIRST, tmp_path / "copy" / FIRST
    whole = path.read_bytes()
    parts = [slice(*place_of(path, tensor)) for tensor in (*IN_FILE, *TABLES)]
    stores = [way(folder) for way in (verified, told)]
    assert refusals(stores[1], folder) == {}  # this also opens the files of the store that was told
    shutil.copytree(folder, copy.parent)
    WRONGS[name][0](copy)
    with path.open("r+b") as file:
        file.truncate(0)
        file.write(copy.read_bytes())
    differs = any(whole[part] != copy.read_bytes()[part] for part in parts)
    for store in stores:
        lines = refusals(store, folder)
        assert bool(lines) is differs
        assert {3, 4}.isdisjoint(lines), "the other shard is as it was"


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_file_that_loses_its_name_is_read_on_by_whoever_has_it_open(folder, tmp_path, change):
    opened, later = verified(folder), told(folder)
    (folder / FIRST).unlink()
    if change == "replaced":
        shutil.copy(write_shard(tmp_path / "other", CUT, RIGHT[3:]), folder / FIRST)
        with pytest.raises(StoreError, match="was changed or replaced since the first rank looked"):
            later.fields(0)
    assert refusals(opened, folder) == {}


def test_counts_that_wrap_around_are_refused():
    """The sum of these counts is 5 in int64, because four times 2**62 wraps around to 0."""
    counts = np.array([2**62] * 4 + [5])
    assert counts.sum() == 5
    assert wrong_count(counts, 0, 5) == f"rollout 0 has {2**62}; possible are 0 to 5"
    assert wrong_count(counts[4:], 0, 5) is None
