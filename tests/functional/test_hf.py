"""Weights between transformers and Megatron: both ways, and the same model."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path

import pytest
import torch
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
    patched: TreeWorker, policy: Policy, tmp_path: Path, layout_in: list[str], layout_out: list[str]
) -> None:
    into = [*ONE, "--hf-import", str(policy.hf), "--save", str(tmp_path / "checkpoint")]
    into += ["--save-interval", "1", *layout_in]
    patched.run(export, 2 if layout_in else 1, arguments(into), timeout_s=120)
    out = [*ONE, "--hf-export", str(tmp_path / "hf"), "--load", str(tmp_path / "checkpoint")]
    ranks = 4 if PP2[0] in layout_out else 2 if layout_out else 1
    patched.run(export, ranks, arguments(out, layout_out), timeout_s=120)
    assert same_files(tmp_path / "hf", policy.hf)


def same_files(one: Path, other: Path) -> bool:
    """Whether two folders have files of the same names and bytes."""
    ours, theirs = ({f.name: f.read_bytes() for f in folder.iterdir()} for folder in (one, other))
    return ours == theirs


def export_and_listen(rank: int, checkpoint: Path, argv: list[str], keeps: bool) -> str:
    """Export a checkpoint, whose own arguments are taken out of it or kept; what stderr says."""
    (file,) = checkpoint.glob("iter_*/*/*.pt")
    saved = torch.load(file, weights_only=False)
    if not keeps:
        del saved["args"]
    torch.save(saved, file)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        export(rank, argv)
    return said.getvalue()


@pytest.mark.parametrize("keeps", [True, False])
def test_a_checkpoint_in_one_file_is_exported_without_its_arguments_with_a_warning(
    patched: TreeWorker, policy: Policy, torch_checkpoint: Path, tmp_path: Path, keeps: bool
) -> None:
    """There is nothing to compare the arguments of the export with."""
    folder = tmp_path / "changed"
    shutil.copytree(torch_checkpoint, folder)
    argv = [*ONE, "--load", str(folder), "--ckpt-format", "torch"]
    argv = arguments(argv, ["--hf-export", str(tmp_path / "hf")])
    (said,) = patched.run(export_and_listen, 1, folder, argv, keeps, timeout_s=120)
    warning = "changed: the checkpoint holds no arguments, so yours could not be compared"
    assert (warning in said) != keeps
    assert same_files(tmp_path / "hf", policy.hf)
