"""What another implementation of the model says about a store's routes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from megatron_r3.cli import main
from megatron_r3.engines.transformers import capture_routes
from megatron_r3.routes import Routes
from megatron_r3.store import Rollout, StoreInfo, write_shard


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        mlp_only_layers=[0],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
    )
    folder = tmp_path_factory.mktemp("model")
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def store(model: Path, folder: Path, shift: int) -> Path:
    """Four rollouts with transformers' own routes, each id moved on by `shift`."""
    network = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    rollouts = []
    for sample in range(4):
        ids = torch.randint(0, 64, (1, 20), generator=torch.Generator().manual_seed(sample))
        with torch.no_grad(), capture_routes(network) as captured:
            logits = network(ids[:, :-1]).logits[0]
        routes = Routes.from_array((captured.take()[0].numpy() + shift) % 8, 8)
        logprobs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        response = np.arange(20) >= 5
        given = np.where(response, np.append(0.0, logprobs.numpy()), 0).astype(np.float32)
        tokens = ids[0].numpy().astype(np.int32)
        rollouts.append(Rollout(tokens, response, given, 0.0, 0, 0, routes, sample))
    write_shard(folder, StoreInfo(8, 2, (1, 2), "transformers", "5"), rollouts)
    return folder


def test_its_own_routes_agree(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = store(model, tmp_path / "right", 0)
    assert main(["rollouts", "inspect", str(directory), "--model", str(model)]) == 0
    out, err = capsys.readouterr()
    assert "4 rollouts, 60 sampled tokens" in out
    assert "1.000 1.000" in out
    assert "0.00000, 0.00000" in out
    assert "warning" not in err


def test_other_routes_are_flagged(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = store(model, tmp_path / "wrong", 3)
    argv = ["rollouts", "inspect", str(directory), "--model", str(model), "--agreement", "2"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert "2 rollouts, 30 sampled tokens" in out
    assert err.count("warning: ") == 2
    assert "in layer 1 only" in err


def test_another_model_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = store(model, tmp_path / "right", 0)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["rollouts", "inspect", str(directory), "--model", str(empty)]) == 1
    assert "error: " in capsys.readouterr().err
