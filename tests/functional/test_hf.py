"""Weights between transformers and Megatron: both ways, and the same model."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import VOCABULARY, batch, config, model, start
from training import Policy, export

from demo.model import arguments
from megatron_r3.data.fingerprint import router_digest, router_fingerprint
from megatron_r3.weights.write_policy import read_policy, write_policy
from proof.fidelity.rig.worker import TreeWorker

ONE = ["--micro-batch-size", "1"]


def write(rank: int, folder: str, **options: Any) -> tuple[torch.Tensor, list[str]]:
    """Export a model whose weights are bfloat16 values; its logits, and its routers' digests."""
    start()
    gpt = model(config(moe_router_replay=False, **options))
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.copy_((parameter + 0.1 * torch.randn_like(parameter)).bfloat16().float())
    write_policy([gpt], Path(folder), vocab_size=VOCABULARY)
    tokens, positions, _ = batch()
    routers = (getattr(layer.mlp, "router", None) for layer in gpt.decoder.layers)
    digests = [router_digest(router.weight) for router in routers if router is not None]
    return gpt(tokens, positions, None).detach(), digests


def read(rank: int, folder: str) -> torch.Tensor:
    start()
    gpt = model(config(moe_router_replay=False))
    read_policy([gpt], Path(folder))
    tokens, positions, _ = batch()
    return gpt(tokens, positions, None).detach()


def read_wrong(rank: int, folder: str, **options: int) -> str:
    start()
    gpt = model(config(moe_router_replay=False, **options))
    before = {name: p.clone() for name, p in gpt.named_parameters()}
    try:
        read_policy([gpt], Path(folder))
    except ValueError as error:
        assert all(torch.equal(p, before[name]) for name, p in gpt.named_parameters())
        return str(error)
    return ""


@pytest.fixture(scope="module")
def exported(patched: TreeWorker, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    folder = tmp_path_factory.mktemp("hf")
    ((logits, digests),) = patched.run(write, 1, str(folder))
    return folder, logits, digests


@pytest.fixture(scope="module")
def exported_dense(patched: TreeWorker, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """With a dense first layer."""
    folder = tmp_path_factory.mktemp("hf-dense")
    ((logits, digests),) = patched.run(write, 1, str(folder), moe_layer_freq=[0, 1, 1, 1])
    return folder, logits, digests


@pytest.mark.parametrize("name", ["exported", "exported_dense"])
def test_transformers_computes_the_same_logits(name: str, request: pytest.FixtureRequest) -> None:
    folder, logits, _ = request.getfixturevalue(name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        got = theirs(batch()[0]).logits
    assert torch.allclose(got, logits, atol=2e-5)
    assert not torch.allclose(got.roll(1, 1), logits, atol=1e-2)


def test_round_trip_is_bitwise(patched: TreeWorker, exported: tuple) -> None:
    folder, logits, _ = exported
    (got,) = patched.run(read, 1, str(folder))
    assert torch.equal(got, logits)


def test_fingerprint_is_the_same_on_both_sides_and_by_layer(exported: tuple) -> None:
    folder, _, digests = exported
    assert router_fingerprint(folder, (0, 1, 2, 3)) == tuple(digests)
    assert len(set(digests)) == 4


def test_a_directory_that_lacks_a_tensor(
    patched: TreeWorker, exported: tuple, tmp_path: Path
) -> None:
    tensors = weights(exported[0])
    del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(exported[0] / "config.json", tmp_path)
    (message,) = patched.run(read_wrong, 1, str(tmp_path))
    assert "no tensor model.layers.2.mlp.experts.5.up_proj.weight" in message


def test_a_directory_of_another_shape(patched: TreeWorker, exported: tuple) -> None:
    (message,) = patched.run(read_wrong, 1, str(exported[0]), moe_ffn_hidden_size=24)
    assert "other model arguments" in message


def test_import_and_export_of_a_checkpoint_are_inverse(
    patched: TreeWorker, policy: Policy, tmp_path: Path
) -> None:
    one = ["--micro-batch-size", "1"]
    into = [*one, "--hf-import", str(policy.hf), "--save", str(tmp_path / "checkpoint")]
    into += ["--save-interval", "1"]
    patched.run(export, 1, arguments(into), timeout_s=120)
    out = [*one, "--hf-export", str(tmp_path / "hf"), "--load", str(tmp_path / "checkpoint")]
    patched.run(export, 1, arguments(out), timeout_s=120)
    assert same_files(tmp_path / "hf", policy.hf)


PP2 = ["--pipeline-model-parallel-size", "2"]
EP2 = ["--expert-model-parallel-size", "2"]
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]


@pytest.mark.parametrize(
    ("layout_in", "layout_out"),
    [(TP2, [*PP2, *EP2]), ([*PP2, "--num-virtual-stages-per-pipeline-rank", "2"], EP2)],
)
def test_import_and_export_in_several_processes(
    patched: TreeWorker,
    policy: Policy,
    tmp_path: Path,
    layout_in: list[str],
    layout_out: list[str],
) -> None:
    into = [*ONE, "--hf-import", str(policy.hf), "--save", str(tmp_path / "checkpoint")]
    into += ["--save-interval", "1", *layout_in]
    patched.run(export, 2, arguments(into), timeout_s=120)
    out = [*ONE, "--hf-export", str(tmp_path / "hf"), "--load", str(tmp_path / "checkpoint")]
    ranks = 4 if PP2[0] in layout_out else 2
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


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


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
