"""`python -m proof.benchmarks.tiles`: what it proposes, and that the kernels then use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_r3.replay.gate.tile_table import Tile, read_table, rule
from proof.benchmarks.tiles import LANE, best, candidates

ROOT = Path(__file__).parents[3]
RULE, OTHER, THIRD = Tile(8, 1), Tile(8, 2), Tile(16, 2)


def of_rule(median: float, tells: bool = True) -> dict[str, Any]:
    return {"of_rule": {"median": median, "tells": tells}}


EQUAL = [of_rule(1.0, False), of_rule(1.0, False)]
CHOICES: dict[str, tuple[list[dict[str, Any]], Tile]] = {
    "faster": ([of_rule(0.9), of_rule(0.8)], OTHER),
    "faster at the most tokens": ([of_rule(0.99, False), of_rule(0.8)], OTHER),
    "slower at few tokens": ([of_rule(1.1), of_rule(0.8)], RULE),
    "not told from the rule": ([of_rule(0.9), of_rule(0.8, False)], RULE),
    "slower": ([of_rule(1.2), of_rule(1.3)], RULE),
}


@pytest.mark.parametrize("name", CHOICES)
def test_only_what_is_told_to_be_faster_takes_the_place_of_the_rule(name: str) -> None:
    rows, want = CHOICES[name]
    assert best({RULE: EQUAL, OTHER: rows}) == want


def test_the_fastest_of_several() -> None:
    faster = [of_rule(0.9), of_rule(0.8)]
    assert best({RULE: EQUAL, OTHER: faster, THIRD: [of_rule(0.85), of_rule(0.8)]}) == THIRD
    assert best({RULE: EQUAL, OTHER: faster, THIRD: [of_rule(0.95), of_rule(0.8)]}) == OTHER


@pytest.mark.parametrize("words", [1, 4, 8, 16, 32])
def test_candidates_fill_their_lanes(words: int) -> None:
    tiles = candidates(words, rehearse=False)
    assert next(iter(tiles.values())) == rule(words)
    assert len(set(tiles.values())) == len(tiles) > 6
    for rows, num_warps in tiles.values():
        assert LANE[0] <= words * rows / num_warps <= LANE[1]


def tuned(out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "proof.benchmarks.tiles", "--out", str(out), "--device", "cpu"]
    argv += ["--rehearse", "--models", "Qwen3-30B-A3B", *more]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_rehearsal_runs_the_kernels_and_proposes_a_table(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    run = tuned(tmp_path)
    assert run.returncode == 0, run.stderr
    table = read_table(tmp_path / "tiles.json")
    assert {(gpu, shape.kernel, shape.words) for gpu, shape in table} == {
        ("cpu", "forward", 4),
        ("cpu", "backward", 4),
    }
    # two rounds tell nothing, so the rule stays
    assert set(table.values()) == {rule(4)}
    (results,) = tmp_path.glob("cpu-*.json")
    rows = json.loads(results.read_text())["tiles"]["rows"]
    assert {(row["rows"], row["num_warps"]) for row in rows} == {(8, 1), (4, 1)}
    assert all(row["agrees"] for row in rows)


def test_a_candidate_that_is_wrong_is_an_error(tmp_path: Path) -> None:
    """In the process that Triton interprets, with a kernel that forgets the scale of a gate."""
    pytest.importorskip("triton")
    code = (
        "import sys\n"
        "import megatron_r3.replay.gate.triton as gate\n"
        "right = gate.replayed_gate_triton\n"
        "def wrong(inputs, options):\n"
        "    out = right(inputs, options)\n"
        "    return out._replace(probs_TE=1.05 * out.probs_TE)\n"
        "gate.replayed_gate_triton = wrong\n"
        "from proof.benchmarks.tiles import main\n"
        f"argv = ['--out', {str(tmp_path)!r}, '--device', 'cpu', '--rehearse']\n"
        "sys.exit(main([*argv, '--models', 'Qwen3-30B-A3B']))"
    )
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    argv = [sys.executable, "-c", code]
    run = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stderr
    assert "error: Qwen3-30B-A3B, 4 rows by 1 warps: not what the reference" in run.stderr
    assert json.loads((tmp_path / "tiles.json").read_text()) == []


def test_out_is_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    run = tuned(file)
    assert run.returncode == 2
    assert f"--out: a folder, and {file} is a file" in run.stderr
