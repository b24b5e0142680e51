"""Each family: transformers' weights in Megatron compute the same, and come back as they were.

Shape suffixes (docs/glossary.md): B, S, E.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import MODELS, Computed, compute, load, make, move, refusals
from once import Once
from safetensors.torch import load_file, save_file
from transformers import Mxfp4Config

from megatron_r3.weights.families import FAMILIES
from proof.fidelity.rig.rank_process import RankError
from proof.fidelity.rig.worker import TreeWorker

NO_Q_LORA = ("deepseek_v2 without q_lora", "deepseek_v3 without q_lora")
WHOLE = [name for name in MODELS if name not in NO_Q_LORA]
# what transformers neither reads nor writes, and vLLM cannot load or compute the family without
ENGINES_READ = {
    "deepseek_v2": {"scoring_func": "softmax", "n_group": 1, "topk_group": 1},
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}
# absolute differences of logits, which go up to 4.7: of the same model; of another one
TOLERANCE, OTHER = 1e-5, 1e-2


@pytest.fixture(scope="session")
def directory(once: Once) -> Any:
    """The transformers directory of a model by its name, made once in a session."""

    def made(name: str) -> Path:
        return once(f"family {name}", lambda folder: make(name, folder))

    return made


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def is_same(ours: Computed, theirs: Computed) -> None:
    difference = (ours.logits[..., : theirs.logits.shape[-1]] - theirs.logits).abs()
    assert difference.max() < TOLERANCE
    assert len(ours.routes_BSE) == len(theirs.routes_BSE) > 0
    for mine, other in zip(ours.routes_BSE, theirs.routes_BSE, strict=True):
        assert torch.equal(mine, other)


def comes_back(folder: Path, out: Path) -> None:
    want, got = tensors_of(folder), tensors_of(out)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype == torch.float32
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("name", WHOLE)
def test_a_model_computes_the_same_and_comes_back(
    patched: TreeWorker, directory: Any, name: str, tmp_path: Path
) -> None:
    folder, out = directory(name), tmp_path / "out"
    theirs = compute(load(folder))
    (ours,) = patched.run(move, 1, folder, out, timeout_s=120)
    is_same(ours, theirs)
    comes_back(folder, out)
    # what Megatron says of itself in config.json is the same model
    again = compute(load(out))
    assert torch.equal(again.logits, theirs.logits)
    written = json.loads((out / "config.json").read_text())
    # without a directory that names it, GLM-4.7-Flash is a DeepSeek-V3, which computes the same
    model_type = "deepseek_v3" if name == "glm4_moe_lite" else MODELS[name][0]
    assert FAMILIES[model_type].arguments(written)
    assert ENGINES_READ.get(model_type, {}).items() <= written.items()
    # transformers keeps the correction bias in float32, whatever the other weights are
    for key, tensor in tensors_of(tmp_path / "bfloat16").items():
        kept = key.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if kept else torch.bfloat16)


@pytest.mark.parametrize("name", MODELS)
def test_no_tensor_could_be_another_one(directory: Any, name: str) -> None:
    """The control of the test above: it would see any tensor that went elsewhere."""
    model = load(directory(name))
    before = compute(model).logits
    assert (before.roll(1, 1) - before).abs().max() > OTHER
    for key, tensor in model.state_dict().items():
        kept = tensor.clone()
        with torch.no_grad():
            tensor.copy_(kept.flip(*range(kept.dim())))  # the first expert becomes the last
            changed = (compute(model).logits - before).abs().max()
            tensor.copy_(kept)
        assert changed > OTHER, key
    assert torch.equal(compute(model).logits, before)


@pytest.mark.parametrize("layout", ["expert", "tensor"])
@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3"])
def test_two_ranks(
    patched: TreeWorker, directory: Any, name: str, layout: str, tmp_path: Path
) -> None:
    folder, out = directory(name), tmp_path / "out"
    more: tuple[str, ...] = (f"--{layout}-model-parallel-size", "2")
    if layout == "tensor":
        more += ("--sequence-parallel", "--expert-tensor-parallel-size", "1")
    ranks = patched.run(move, 2, folder, out, more, timeout_s=120)
    if (
        layout == "tensor"
    ):  # each rank has a part of the vocabulary, and routes a part of a sequence
        routes_BSE = [
            torch.cat(parts, 1) for parts in zip(*(r.routes_BSE for r in ranks), strict=True)
        ]
        ranks = [Computed(torch.cat([rank.logits for rank in ranks], -1), routes_BSE)]
    theirs = compute(load(folder))
    for ours in ranks:
        is_same(ours, theirs)
    comes_back(folder, out)


@pytest.mark.parametrize("name", NO_Q_LORA)
def test_latent_attention_without_q_lora(
    patched: TreeWorker, directory: Any, name: str, tmp_path: Path
) -> None:
    """Before 0.19 it is as in transformers; from 0.19 on Megatron has no model like that."""
    folder, out = directory(name), tmp_path / "out"
    newer = patched.tree / "megatron/core/transformer/mla_qk_norm_config.py"
    if newer.exists():
        with pytest.raises(RankError, match="q_lora_rank is None"):
            patched.run(move, 1, folder, out, timeout_s=120)
        return
    (ours,) = patched.run(move, 1, folder, out, timeout_s=120)
    is_same(ours, compute(load(folder)))
    comes_back(folder, out)


def in_fp8(folder: Path, to: Path) -> dict[str, torch.Tensor]:
    """A copy whose matrices are in fp8, in blocks of 16 x 10; what the copy then describes."""
    made, described = {}, {}
    for name, tensor in tensors_of(folder).items():
        made[name] = described[name] = tensor
        if not name.endswith("_proj.weight"):
            continue
        eighths = torch.empty_like(tensor, dtype=torch.float8_e4m3fn)
        scale = torch.empty(-(-tensor.shape[0] // 16), -(-tensor.shape[1] // 10))
        described[name] = torch.empty_like(tensor)
        for i, j in itertools.product(*map(range, scale.shape)):
            at = slice(16 * i, 16 * i + 16), slice(10 * j, 10 * j + 10)
            scale[i, j] = tensor[at].abs().max() / 448
            eighths[at] = (tensor[at] / scale[i, j]).to(torch.float8_e4m3fn)
            described[name][at] = eighths[at].float() * scale[i, j]
        made |= {name: eighths, f"{name}_scale_inv": scale}
    to.mkdir()
    save_file(made, to / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 10]}
    (to / "config.json").write_text(json.dumps(config))
    return described


def test_a_directory_in_fp8(patched: TreeWorker, directory: Any, tmp_path: Path) -> None:
    described = in_fp8(directory("deepseek_v3"), tmp_path / "fp8")
    out = tmp_path / "out"
    patched.run(move, 1, tmp_path / "fp8", out, timeout_s=120)
    plain, got = tensors_of(directory("deepseek_v3")), tensors_of(out)
    assert got.keys() == described.keys()
    for name, tensor in described.items():
        assert torch.equal(got[name], tensor), name
        # the control: rounding to fp8 shows, so these are not the weights from before
        assert torch.equal(plain[name], tensor) != name.endswith("_proj.weight"), name
    config = tmp_path / "fp8" / "config.json"
    config.write_text(config.read_text().replace("[16, 10]", "[16, 16]"))
    with pytest.raises(RankError, match=r"fp8: model.*_proj.weight: scales \(.*\) for .* in"):
        patched.run(move, 1, tmp_path / "fp8", tmp_path / "wrong" / "out", timeout_s=120)
    copied = json.loads((tmp_path / "like" / "config.json").read_text())
    assert "quantization_config" not in copied


def in_mxfp4(folder: Path, to: Path) -> None:
    """A copy whose experts are random bytes in mxfp4, as gpt-oss is shipped."""
    generator = torch.Generator().manual_seed(9)
    made = {}
    for name, tensor in tensors_of(folder).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            made[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape  # 32 inputs share a scale
        shape = (experts, outputs, inputs // 32, 16)
        made[f"{name}_blocks"] = torch.randint(0, 256, shape, generator=generator).byte()
        scales = torch.randint(122, 126, shape[:-1], generator=generator)
        made[f"{name}_scales"] = scales.byte()
    to.mkdir()
    save_file(made, to / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (to / "config.json").write_text(json.dumps(config))


def test_a_directory_in_mxfp4(patched: TreeWorker, tmp_path: Path) -> None:
    """The weights, and the logits, are those that transformers makes of the bytes."""
    model_type, fields = MODELS["gpt_oss"]
    make("wide", tmp_path / "plain", {"wide": (model_type, {**fields, "intermediate_size": 32})})
    in_mxfp4(tmp_path / "plain", folder := tmp_path / "mxfp4")
    out = tmp_path / "out"
    (ours,) = patched.run(move, 1, folder, out, timeout_s=120)
    theirs = load(folder, quantization_config=Mxfp4Config(dequantize=True))
    is_same(ours, compute(theirs))
    got, plain = tensors_of(out), tensors_of(tmp_path / "plain")
    want = theirs.state_dict()
    assert got.keys() == plain.keys() == want.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, want[name]), name
        # the control: the experts are not those from before
        assert torch.equal(tensor, plain[name]) != name.endswith(("up_proj", "down_proj")), name
    copied = json.loads((tmp_path / "like" / "config.json").read_text())
    assert "quantization_config" not in copied


def changed_copy(folder: Path, to: Path, **fields: Any) -> Path:
    """A directory whose config.json has other fields; None takes a field away."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    rope = config["rope_parameters"]
    for name, value in fields.items():
        place = rope if name in rope else config
        place[name] = value
        if value is None:
            del place[name]
    (to / "config.json").write_text(json.dumps(config))
    return to


OTHER_YARN = {"factor": 4, "beta_fast": 32, "beta_slow": 0.1, "mscale": 1.0, "mscale_all_dim": 0.5}
OTHER_YARN |= {"original_max_position_embeddings": 4096}


@pytest.mark.parametrize("name", OTHER_YARN)
def test_each_number_of_yarn_shows(directory: Any, name: str, tmp_path: Path) -> None:
    """The control of Kimi-K2: Megatron would not compute the same if it ignored the number."""
    folder = directory("kimi_k2")
    other = changed_copy(folder, tmp_path / "other", **{name: OTHER_YARN[name]})
    change = compute(load(other)).logits - compute(load(folder)).logits
    assert change.abs().max() > OTHER


# beside the numbers: fields that no shape of a tensor shows, and a value of another model
OTHERS: dict[str, list[tuple[str, Any]]] = {
    "qwen3_moe": [("norm_topk_prob", False), ("norm_topk_prob", None), ("mlp_only_layers", [0])],
    "qwen2_moe": [("norm_topk_prob", True), ("qkv_bias", False), ("mlp_only_layers", [2])],
    "mixtral": [("num_local_experts", 4)],
    "deepseek_v3": [("topk_group", 4), ("n_shared_experts", 1), ("q_lora_rank", None)],
    "deepseek_v2": [("n_group", 4), ("norm_topk_prob", True), ("topk_method", "noaux_tc")],
    "kimi_k2": [("beta_fast", None), ("beta_fast", 32), ("rope_interleave", False)],
    "glm4_moe": [("use_qk_norm", False), ("partial_rotary_factor", 1.0), ("head_dim", 8)],
    "gpt_oss": [("sliding_window", 5), ("layer_types", ["full_attention"] * 3), ("factor", 4.0)],
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_directory_of_another_model(
    patched: TreeWorker, directory: Any, name: str, tmp_path: Path
) -> None:
    folder, family = directory(name), FAMILIES[name]
    config = json.loads((folder / "config.json").read_text())
    fields = {**config, **config["rope_parameters"]}
    others = [
        (row.name, fields[row.name] * 2)
        for row in family.rows
        if row.attributes
        and type(fields.get(row.name)) in (int, float)
        and row.name not in ("num_hidden_layers", "max_position_embeddings")
    ]
    others = [*others, *OTHERS[name]]
    folders = [
        changed_copy(folder, tmp_path / str(number), **{field: value})
        for number, (field, value) in enumerate(others)
    ]
    said = patched.run(refusals, 1, folder, folders, timeout_s=120)[0]
    for message, (field, value), at in zip(said, others, folders, strict=True):
        assert message.startswith(f"{at / 'config.json'}: "), (field, value, message)
        # of twice as many heads not all have their own keys any more
        assert field in message or "num_key_value_heads" in message, (field, value, message)
