"""Weights between transformers and Megatron: both ways, and the same model."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from training import Policy, export

from demo.model import arguments
from proof.fidelity.rig.worker import TreeWorker

ONE = ["--micro-batch-size", "1"]


PP2 = ["--pipeline-model-parallel-size", "2"]
EP2 = ["--expert-model-parallel-size", "2"]
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]


@pytest.mark.parametrize(
    ("layout_in", "layout_out"),
    [([], []), (TP2, [*PP2, *EP2]), ([*PP2, "--num-virtual-stages-per-pipeline-rank", "2"], EP2)],
)
def test_import_and_export_are_inverse_in_any_layout(
    patched: TreeWorker,
    policy: Policy,
    tmp_path: Path,
    layout_in: list[str],
    layout_out: list[str],
) -> None:
    into = [*ONE, "--hf-import", str(policy.hf), "--save", str(tmp_path / "checkpoint")]
    into += ["--save-interval", "1", *layout_in]
    patched.run(export, 2 if layout_in else 1, arguments(into), timeout_s=120)
    out = [*ONE, "--hf-export", str(tmp_path / "hf"), "--load", str(tmp_path / "checkpoint")]
    ranks = 4 if PP2[0] in layout_out else 2 if layout_out else 1
    patched.run(export, ranks, arguments(out, layout_out), timeout_s=120)
    assert same_files(tmp_path / "hf", policy.hf)


def test_an_exported_checkpoint_is_a_transformers_model(policy: Policy) -> None:
    described = json.loads((policy.hf / "config.json").read_text())
    assert described["model_type"] == "qwen3_moe"
    loaded, missing = transformers.AutoModelForCausalLM.from_pretrained(
        policy.hf, output_loading_info=True
    )
    assert loaded.config.num_experts == 16
    assert not missing["missing_keys"]
    assert not missing["unexpected_keys"]


def same_files(one: Path, other: Path) -> bool:
    """Whether two folders have files of the same names and bytes."""
    ours, theirs = ({f.name: f.read_bytes() for f in folder.iterdir()} for folder in (one, other))
    return ours == theirs


def without_arguments(rank: int, checkpoint: Path, argv: list[str]) -> str:
    """Take a checkpoint's own arguments out of it, and export it; what is said to stderr."""
    (file,) = checkpoint.glob("iter_*/*/*.pt")
    saved = torch.load(file, weights_only=False)
    del saved["args"]
    torch.save(saved, file)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        export(rank, argv)
    return said.getvalue()


def test_a_checkpoint_without_arguments_is_exported_with_a_warning(
    patched: TreeWorker, policy: Policy, torch_checkpoint: Path, tmp_path: Path
) -> None:
    """There is nothing to compare the arguments of the export with."""
    shutil.copytree(torch_checkpoint, tmp_path / "changed")
    argv = [*ONE, "--load", str(tmp_path / "changed"), "--ckpt-format", "torch"]
    argv = arguments(argv, ["--hf-export", str(tmp_path / "hf")])
    (said,) = patched.run(without_arguments, 1, tmp_path / "changed", argv, timeout_s=120)
    assert "changed: it has no arguments of its own, so that nobody can tell" in said
    assert same_files(tmp_path / "hf", policy.hf)


def test_a_checkpoint_in_one_file_is_exported(
    patched: TreeWorker, policy: Policy, torch_checkpoint: Path, tmp_path: Path
) -> None:
    argv = [*ONE, "--load", str(torch_checkpoint), "--ckpt-format", "torch"]
    patched.run(export, 1, arguments(argv, ["--hf-export", str(tmp_path / "hf")]), timeout_s=120)
    assert same_files(tmp_path / "hf", policy.hf)
