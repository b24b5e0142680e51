"""Which tile a shape has: measured on this very GPU, or the rule's; a wrong table is an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_r3.replay.gate.tile_table import (
    SHIPPED,
    VARIABLE,
    Shape,
    Tile,
    read_table,
    rule,
    tile_for,
    use_table,
    words_of,
)

CPU = torch.device("cpu")
QWEN = Shape("forward", 4, 8, "bfloat16")
ENTRY: dict[str, Any] = {
    **{"gpu": "cpu", "kernel": "forward", "words": 4, "topk": 8, "dtype": "bfloat16"},
    **{"rows": 16, "num_warps": 2, "measured": {"date": "2026-11-22"}},
}


def written(folder: Path, *entries: Any) -> Path:
    path = folder / "tiles.json"
    path.write_text(json.dumps(entries))
    return path


def test_words_and_the_rule() -> None:
    assert [words_of(n) for n in (1, 32, 33, 128, 256, 384, 512, 1024)] == [
        1,
        1,
        2,
        4,
        8,
        16,
        16,
        32,
    ]
    assert rule(4) == Tile(8, 1)
    assert rule(32) == Tile(1, 1)


def test_the_table_of_the_package_has_measurements_only() -> None:
    read_table(SHIPPED)
    for entry in json.loads(SHIPPED.read_text()):
        assert entry["gpu"] != "cpu"
        assert not entry["measured"]["rehearsal"]
        assert entry["measured"]["of_rule"]


def test_an_entry_holds_for_its_kernel_shape_and_gpu_alone(tmp_path: Path) -> None:
    with use_table(read_table(written(tmp_path, ENTRY))):
        assert tile_for(QWEN, CPU) == Tile(16, 2)
        for other in ({"kernel": "backward"}, {"words": 8}, {"topk": 6}, {"dtype": "float32"}):
            shape = QWEN._replace(**other)
            assert tile_for(shape, CPU) == rule(shape.words)
    with use_table(read_table(written(tmp_path, {**ENTRY, "gpu": "NVIDIA H200"}))):
        assert tile_for(QWEN, CPU) == rule(4)
    with use_table({}):
        assert tile_for(QWEN, CPU) == rule(4)


WRONG: dict[str, tuple[list[Any], str]] = {
    "a number": ([7], "entry 0: an object, not int"),
    "nothing measured": ([{n: v for n, v in ENTRY.items() if n != "measured"}], "without measured"),
    "kernel": ([{**ENTRY, "kernel": "both"}], "kernel: one of forward, backward, not 'both'"),
    "words": ([{**ENTRY, "words": 3}], "words: a power of two up to 32, not 3"),
    "words of text": ([{**ENTRY, "words": "4"}], "words: a power of two up to 32, not '4'"),
    "topk": ([{**ENTRY, "topk": 0}], "topk: 1 to 64, not 0"),
    "dtype": ([{**ENTRY, "dtype": "float64"}], "dtype: one of bfloat16, .* not 'float64'"),
    "rows": ([{**ENTRY, "rows": 3}], "rows: a power of two, .* not 3"),
    "too many rows": ([{**ENTRY, "rows": 128}], "rows: .* up to 8192, not 128"),
    "warps": ([{**ENTRY, "num_warps": 3}], r"num_warps: one of \(1, 2, 4, 8\), not 3"),
    "twice": ([ENTRY, ENTRY], "entry 1: a second one"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_table_is_named(name: str, tmp_path: Path) -> None:
    entries, said = WRONG[name]
    path = written(tmp_path, *entries)
    with pytest.raises(ValueError, match=f"^{path}: .*{said}"):
        read_table(path)


@pytest.mark.parametrize(
    ("text", "said"), [("{", "no JSON"), ("{}", "a list of entries, not dict")]
)
def test_another_file_is_no_table(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_table(path)


def asked(named: str) -> subprocess.CompletedProcess[str]:
    """The tile of QWEN in a process of its own: the variable is read once."""
    code = (
        "import torch; from megatron_r3.replay.gate.tile_table import *\n"
        f"print(tuple(tile_for(Shape{tuple(QWEN)}, torch.device('cpu'))))"
    )
    env = {**os.environ, VARIABLE: named}
    argv = [sys.executable, "-c", code]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_variable_names_another_table(tmp_path: Path) -> None:
    assert asked(str(written(tmp_path, ENTRY))).stdout.strip() == "(16, 2)"
    assert asked(str(SHIPPED)).stdout.strip() == "(8, 1)"
    missing = asked(str(tmp_path / "none.json"))
    assert missing.returncode == 1
    assert f"{VARIABLE}={tmp_path / 'none.json'}: " in missing.stderr
    assert "no table of tiles: No such file" in missing.stderr
