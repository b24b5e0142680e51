"""The benchmark of many ranks: what it counts, and what it fits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from proof.benchmarks import scale


def test_what_is_asked_of_files_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(100))
    with scale.counted() as counts:
        descriptor = os.open(tmp_path / "a", os.O_RDONLY)
        os.preadv(descriptor, [bytearray(64)], 60)
        os.fstat(descriptor)
        os.close(descriptor)
        os.stat(tmp_path)
        os.listdir(tmp_path)
    assert counts == {"opens": 1, "stats": 2, "listings": 1, "bytes": 40}
    os.stat(tmp_path)  # control: outside of the block nothing is counted
    assert counts["stats"] == 2


def test_1024_ranks_are_within_the_aims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two small shards: opens and the first pass; bytes of small rollouts say nothing."""
    monkeypatch.setattr(scale, "TOKENS", 40)
    scale.write_store(tmp_path, 2, 40)
    rows = {row["what"].split(",")[0]: row for row in scale.play(tmp_path)}
    assert rows["opens"]["found"] == pytest.approx(1.0, abs=2 / 1026)  # of 1,024 reads, 2 shards
    for what in ("opens", "stats", "bytes before the first step"):
        assert not scale.wrong(rows[what])


def test_the_exponent_of_a_power() -> None:
    assert scale.exponent([1, 2, 4], [3, 12, 48]) == pytest.approx(2.0)
    assert scale.exponent([1, 2, 4], [3, 3, 3]) == pytest.approx(0.0)
