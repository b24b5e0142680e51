"""`python -m proof.benchmarks.kernel` runs without a GPU, and on little more than torch.

Shape suffixes (docs/glossary.md): E, T.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megatron_r3.replay.gate import (
    GateInputs,
    GateOptions,
    GateOutput,
    replayed_gate_reference,
    substitute_gate,
)
from proof.benchmarks import kernel

ROOT = Path(__file__).parents[3]


def test_a_rehearsal_times_every_way_and_pass(tmp_path: Path) -> None:
    """In a process that has no package of this project but torch."""
    blocked = ("safetensors", "pybase64", "zlib_ng", "tqdm", "transformers")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n"
        "from proof.benchmarks.kernel import main\n"
        f"sys.exit(main({argv(tmp_path / 'kernel.json')}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "kernel.json").read_text())
    assert found["rehearsal"]
    assert found["torch"] == torch.__version__
    skipped = {(row["way"], row["skipped"]) for row in found["rows"] if "skipped" in row}
    missing = "Transformer Engine is not installed"
    assert skipped == {("(c) TE, live", missing), ("(c) TE, live, groups", missing)}
    assert run.stdout.splitlines()[-1] == f"skipped: (c) TE, live, groups: {missing}"
    rows = [row for row in found["rows"] if "skipped" not in row]
    timed = {(row["model"], row["way"], row["pass"]) for row in rows}
    ways = ("kernel", "(a) unfused", "(b) compiled", "(d) copies")
    for model in ("Qwen3-30B-A3B", "DeepSeek-V3"):
        assert timed >= {(model, way, which) for way in ways for which in ("forward", "backward")}
    assert all(row["us"] > 0 for row in rows)
    assert not any(row[ratio]["tells"] for row in rows for ratio in ("of_unfused", "of_copies"))


def argv(out: Path) -> list[str]:
    models = ["--models", "Qwen3-30B-A3B", "DeepSeek-V3"]
    return ["--out", str(out), "--rehearse", *models]


def test_ways_that_do_not_agree_are_an_error(tmp_path, capsys):
    def scaled(inputs: GateInputs, options: GateOptions) -> GateOutput:
        out = replayed_gate_reference(inputs, options)
        return out._replace(probs_TE=1.05 * out.probs_TE)

    with substitute_gate(scaled):
        assert kernel.main(argv(tmp_path / "kernel.json")) == 1
    assert (
        "error: Qwen3-30B-A3B, kernel: the results of this way are not those of (a)"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("factor", [1.0, 1.05])
def test_transformer_engine_is_called_by_its_signature_and_checked(factor, tmp_path, monkeypatch):
    """A stand-in with the arguments of 2.16.1, as Transformer Engine needs a GPU; one is wrong."""
    groups: list[tuple[int | None, int | None]] = []

    def fused_topk_with_score_function(
        logits: torch.Tensor,
        topk: int,
        use_pre_softmax: bool,
        num_groups: int | None,
        group_topk: int | None,
        scaling_factor: float | None,
        score_function: str,
        expert_bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        groups.append((num_groups, group_topk))
        options = GateOptions(score_function, use_pre_softmax, scaling_factor)
        ids = logits.topk(topk, dim=1).indices
        out = replayed_gate_reference(GateInputs(logits, ids, expert_bias), options)
        return out.probs_TE * factor, out.routing_map_TE

    router = ModuleType("transformer_engine.pytorch.router")
    router.fused_topk_with_score_function = fused_topk_with_score_function  # type: ignore
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, router.__name__, router)
    assert kernel.main(argv(tmp_path / "kernel.json")) == (factor != 1.0)
    rows = json.loads((tmp_path / "kernel.json").read_text())["rows"]
    live = [row for row in rows if row["way"].startswith("(c)")]
    assert {row["agrees"] for row in live} == {factor == 1.0}
    assert {row["model"] for row in live if "groups" in row["way"]} == {"DeepSeek-V3"}
    assert set(groups) == {(None, None), (8, 4)}
    assert all(row["of_te"] for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_it_says_how_to_rehearse(tmp_path, capsys):
    assert kernel.main(["--out", str(tmp_path / "kernel.json")]) == 2
    assert "--rehearse" in capsys.readouterr().err
