"""Weights between transformers and Megatron: both ways, and the same model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import SEQUENCE, VOCABULARY, batch, config, model, start
from training import Policy, export

from demo.model import arguments
from megatron_r3.cpu.worker import TreeWorker
from megatron_r3.fingerprint import router_digest
from megatron_r3.hf import from_hf, hf_config, router_fingerprint, to_hf


def write(rank: int, folder: str) -> tuple[torch.Tensor, list[str]]:
    """Export a model whose weights are bfloat16 values; its logits, and its routers' digests."""
    start()
    gpt = model(config(moe_router_replay=False))
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.copy_((parameter + 0.1 * torch.randn_like(parameter)).bfloat16().float())
    to_hf(gpt, Path(folder), hf_config(gpt.config, VOCABULARY, 10000, SEQUENCE))
    tokens, positions, _ = batch()
    digests = [router_digest(layer.mlp.router.weight) for layer in gpt.decoder.layers]
    return gpt(tokens, positions, None).detach(), digests


def read(rank: int, folder: str) -> torch.Tensor:
    start()
    gpt = model(config(moe_router_replay=False))
    from_hf(gpt, Path(folder))
    tokens, positions, _ = batch()
    return gpt(tokens, positions, None).detach()


def read_wrong(rank: int, folder: str, **options: int) -> str:
    start()
    gpt = model(config(moe_router_replay=False, **options))
    before = {name: p.clone() for name, p in gpt.named_parameters()}
    try:
        from_hf(gpt, Path(folder))
    except ValueError as error:
        assert all(torch.equal(p, before[name]) for name, p in gpt.named_parameters())
        return str(error)
    return ""


@pytest.fixture(scope="module")
def exported(patched: TreeWorker, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    folder = tmp_path_factory.mktemp("hf")
    ((logits, digests),) = patched.run(write, 1, str(folder))
    return folder, logits, digests


def test_transformers_computes_the_same_logits(exported: tuple) -> None:
    folder, logits, _ = exported
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
    tensors = load_file(exported[0] / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
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
    want = load_file(policy.hf / "model.safetensors")
    got = load_file(tmp_path / "hf" / "model.safetensors")
    assert got.keys() == want.keys()
    assert all(torch.equal(tensor, got[name]) for name, tensor in want.items())


def test_an_exported_checkpoint_is_a_transformers_model(policy: Policy) -> None:
    described = json.loads((policy.hf / "config.json").read_text())
    assert described["model_type"] == "qwen3_moe"
    loaded, missing = transformers.AutoModelForCausalLM.from_pretrained(
        policy.hf, output_loading_info=True
    )
    assert loaded.config.num_experts == 16
    assert not missing["missing_keys"]
    assert not missing["unexpected_keys"]
