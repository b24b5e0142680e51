"""What another implementation of the model says about a store's routes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_r3.cli import main
from megatron_r3.data.engines.transformers import capture_routes
from megatron_r3.data.fingerprint import policy_stamp
from megatron_r3.data.store import Rollout, RolloutStore, StoreInfo, write_shard
from megatron_r3.replay.routes import Routes


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


def store(model: Path, folder: Path, shift: int, shift_ids: int = 0) -> Path:
    """Four rollouts with transformers' own routes, each id moved on by `shift`.

    `shift_ids` is added to each token id afterwards.
    """
    network = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    rollouts = []
    for sample in range(4):
        ids = torch.randint(0, 64, (1, 20), generator=torch.Generator().manual_seed(sample))
        with torch.no_grad(), capture_routes(network) as captured:
            logits = network(ids[:, :-1]).logits[0]
        chosen = (captured.take()[0].numpy() + shift) % 8
        routes = Routes.from_array(chosen, 8)
        logprobs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        response = np.arange(20) >= 5
        given = np.where(response, np.append(0.0, logprobs.numpy()), 0).astype(np.float32)
        tokens = (ids[0].numpy() + shift_ids).astype(np.int32)
        rollouts.append(Rollout(tokens, response, given, 0.0, 0, 0, routes, sample))
    write_shard(folder, StoreInfo(8, 2, (1, 2), "transformers", "5"), rollouts)
    return folder


def test_its_own_routes_agree(model, tmp_path, capsys):
    directory = store(model, tmp_path / "right", 0)
    assert main(["rollouts", "inspect", str(directory), "--model", str(model)]) == 0
    out, err = capsys.readouterr()
    rows = {
        " ".join(words[:-2]): words[-2:] for line in out.splitlines() if (words := line.split())
    }
    assert "agreement rollouts        4\nagreement tokens          60\n" in out
    assert rows["agreement routes"] == ["1", "1"]
    assert "layer           1: 0.0 %, 2: 0.0 %" in out
    assert "warning" not in err


def test_other_routes_are_flagged(model, tmp_path, capsys):
    directory = store(model, tmp_path / "wrong", 3)
    argv = ["rollouts", "inspect", str(directory), "--model", str(model), "--agreement", "2"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert "agreement rollouts        2\nagreement tokens          30\n" in out
    assert err.count("warning: ") == 1
    assert f"warning: {directory}: the engine computes another model: too many routes differ" in err
    assert "% in layer 1 (at most 66.2 %), " in err
    assert main([*argv, "--fail-on-alarm"]) == 1
    assert main([*argv[:3], "--fail-on-alarm"]) == 1
    assert "--fail-on-alarm needs --model HF_DIR" in capsys.readouterr().err


def test_the_weights_before_the_last_update(model, tmp_path, capsys):
    """The store's routes are those of the weights before; the model is the new one."""
    directory = store(model, tmp_path / "old", 0)
    network = transformers.AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in network.parameters():
            weight += 0.3 * weight.std() * torch.randn(weight.shape) if weight.dim() > 1 else 0
    network.save_pretrained(tmp_path / "new")
    argv = ["rollouts", "inspect", str(directory), "--model", str(tmp_path / "new")]
    assert main([*argv, "--model-before", str(model)]) == 0
    err = capsys.readouterr().err
    assert f"warning: {directory}: weights of another version: all rows are those of the" in err
    assert main(["rollouts", "inspect", str(directory), "--model-before", str(model)]) == 1
    assert "--model-before needs --model HF_DIR" in capsys.readouterr().err


@pytest.mark.parametrize("of_model", [0, 1])
def test_a_store_of_several_policies_is_compared_with_the_models_own(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], of_model: int
) -> None:
    """Version 0 has the model's routes, version 1 has others; the stamp says whose they are."""
    for version, shift in enumerate((0, 3)):
        made = RolloutStore([store(model, tmp_path / f"{version}", shift)])
        rollouts = [replace(made.rollout(i), policy_version=version) for i in range(4)]
        stamp = policy_stamp(model) if version == of_model else "of another"
        write_shard(tmp_path / "both", replace(made.info, policy_stamp=stamp), rollouts)
    capsys.readouterr()
    argv = ["rollouts", "inspect", str(tmp_path / "both"), "--model", str(model)]
    assert main([*argv, "--fail-on-alarm"]) == of_model
    out, err = capsys.readouterr()
    assert f"agreement policy version  {of_model}\nagreement rollouts        4\n" in out
    later = f"{model} sampled policy version 0: later versions are not compared\n"
    assert (later in err) == (of_model == 0)
    (agree,) = [line.split()[-2:] for line in out.splitlines() if "agreement routes" in line]
    assert (agree == ["1", "1"]) == (of_model == 0)


def test_another_model_is_refused(model, tmp_path, capsys):
    directory = store(model, tmp_path / "right", 0)
    empty = tmp_path / "empty"
    empty.mkdir()
    capsys.readouterr()  # transformers' progress
    assert main(["rollouts", "inspect", str(directory), "--model", str(empty)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {empty}: transformers cannot load it: ")
    assert error.count("\n") == 1
    for wrong in ({"num_experts": "x"}, {"hidden_size": [1]}, {"num_attention_heads": 0}):
        config = json.loads((model / "config.json").read_text())
        (empty / "config.json").write_text(json.dumps({**config, **wrong}))
        shutil.copy(model / "model.safetensors", empty)
        assert main(["rollouts", "inspect", str(directory), "--model", str(empty)]) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"error: {empty}: transformers cannot load it: ")
        assert error.isprintable()
    (empty / "config.json").write_text(json.dumps(config))
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, empty / "model.safetensors", metadata={"format": "pt"})
    assert main(["rollouts", "inspect", str(directory), "--model", str(empty)]) == 1
    assert f"{empty}: it lacks model.norm.weight (such tensors: 1)" in capsys.readouterr().err


def test_tokens_outside_the_models_vocabulary(model, tmp_path, capsys):
    directory = store(model, tmp_path / "right", 0, shift_ids=7)
    assert main(["rollouts", "inspect", str(directory), "--model", str(model)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    path = f"{directory}/shard-00000.safetensors"
    assert error.endswith(
        f"error: {model}: {path}: rollout 0: token 5 is id 66; ids go from 0 to 63"
    )
