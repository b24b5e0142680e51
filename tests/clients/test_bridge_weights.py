"""Weights through real mbridge and Megatron-Bridge: as through our own families, on any ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bridge_weights import library_export, move_both_ways, refusals, script, wrong_translations
from client_workers import worker_with
from family_models import BRIDGED, Computed, command, compute, load, make
from once import Once
from safetensors.torch import load_file, save_file
from training import Policy, make_policy, steps_on, stores, train

from megatron_r3.loop.published import published, read_policy, version_name
from proof.fidelity.rig.rank_process import RankError
from proof.fidelity.rig.worker import TreeWorker

TOLERANCE, OTHER = 1e-4, 1e-2
VERSIONS = {"mbridge": "0.15.1", "megatron-bridge": "0.3.1"}
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "1": (1, ()),
    "EP2": (2, ("--expert-model-parallel-size", "2")),
    "TP2": (
        2,
        (
            *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
            *("--expert-tensor-parallel-size", "1"),
        ),
    ),
}


@pytest.fixture(scope="module", params=VERSIONS)
def library(
    request: pytest.FixtureRequest, clients: Path, patched_tree: Path
) -> Iterator[tuple[str, TreeWorker]]:
    """The library's name, and a worker that has imported it."""
    name = request.param
    module = "mbridge" if name == "mbridge" else "import_bridge"
    folder = clients / f"{name}-{VERSIONS[name]}"
    with worker_with(patched_tree, [folder, clients / "site"], module) as worker:
        yield name, worker


@pytest.fixture(scope="session")
def directory(once: Once) -> Any:
    """The transformers directory of a model by its name, made once in a session."""

    def made(name: str) -> Path:
        return once(f"bridged {name}", lambda folder: make(name, folder, BRIDGED))

    return made


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """The names of tensors that only one side has, or that are not equal."""
    names = one.keys() | other.keys()
    return sorted(
        n
        for n in names
        if n not in one
        or n not in other
        or one[n].dtype != other[n].dtype
        or not torch.equal(one[n], other[n])
    )


def computes_the_same(ranks: list[Computed], folder: Path, layout: str) -> None:
    """Every rank has the logits of transformers; under TP2 each a part of the vocabulary."""
    logits = [rank.logits for rank in ranks]
    if layout == "TP2":
        logits = [torch.cat(logits, -1)]
    want = compute(load(folder)).logits
    for got in logits:
        assert (got[..., : want.shape[-1]] - want).abs().max() < TOLERANCE
        assert (got[..., : want.shape[-1]].roll(1, 1) - want).abs().max() > OTHER


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_a_family_of_ours_moves_as_through_ours(library, directory, name, layout, tmp_path):
    bridge, worker = library
    folder, (ranks, more) = directory(name), LAYOUTS[layout]
    computed = worker.run(move_both_ways, ranks, bridge, folder, tmp_path, more, timeout_s=180)
    computes_the_same(computed, folder, layout)
    source, own = tensors_of(folder), tensors_of(tmp_path / "own")
    assert differing(tensors_of(tmp_path / "bridge"), source) == []
    assert differing(own, source) == []
    # also byte by byte: files, index, config.json
    for ours, theirs in (("own", "bridge"), ("own-bfloat16", "bfloat16")):
        files = {file.name: file.read_bytes() for file in (tmp_path / ours).iterdir()}
        assert files == {f.name: f.read_bytes() for f in (tmp_path / theirs).iterdir()}
        assert "model.safetensors.index.json" in files
    # the control: a weight of the last rank shows, and only there
    (changed,) = differing(tensors_of(tmp_path / "changed"), source)
    block = "self_attn.o_proj" if layout == "TP2" else "mlp.experts.7.down_proj"
    assert changed == f"model.layers.2.{block}.weight"


@pytest.mark.parametrize("layout", ["1", "TP2"])
def test_the_export_of_megatron_bridge_itself(library, directory, layout):
    """Its own export knows Megatron's local layers as far as they have no experts."""
    bridge, worker = library
    if bridge == "mbridge":
        pytest.skip("mbridge's own export knows Transformer Engine's layers only")
    folder, (ranks, more) = directory("qwen3"), LAYOUTS[layout]
    want = tensors_of(folder)
    for exported in worker.run(library_export, ranks, folder, more, timeout_s=180):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            exported[name] = exported[name][: want[name].shape[0]]  # it leaves the padding on
        assert differing(exported, want) == []


def test_a_model_that_is_no_family_of_ours(library, directory, tmp_path):
    """By hf.py, which takes the bridge that is installed: a directory, a checkpoint, and back."""
    bridge, worker = library
    folder, (ranks, more) = directory("qwen3"), LAYOUTS["TP2"]
    checkpoint, out = str(tmp_path / "checkpoint"), tmp_path / "hf"
    into = [*more, "--hf-import", str(folder), "--save", checkpoint, "--save-interval", "1"]
    assert worker.run(script, ranks, command(folder, into), timeout_s=180) == [None] * ranks
    back = [*more, "--hf-export", str(out), "--load", checkpoint]
    like = [*back, "--hf-like", str(folder), "--hf-bridge", bridge]
    assert worker.run(script, ranks, command(folder, like), timeout_s=180) == [None] * ranks
    assert differing(tensors_of(out), tensors_of(folder)) == []
    assert (out / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    shutil.rmtree(out)
    refused = worker.run(script, ranks, command(folder, back), timeout_s=180)
    assert refused[0].startswith("error: this model cannot be moved")
    assert not out.exists()


@pytest.mark.parametrize("layout", ["1", "TP2"])
def test_a_model_that_is_no_family_of_ours_computes_the_same(library, directory, layout, tmp_path):
    _, worker = library
    folder, (ranks, more) = directory("qwen3"), LAYOUTS[layout]
    computed = worker.run(move_both_ways, ranks, "auto", folder, tmp_path, more, timeout_s=180)
    computes_the_same(computed, folder, layout)
    assert differing(tensors_of(tmp_path / "bridge"), tensors_of(folder)) == []
    (changed,) = differing(tensors_of(tmp_path / "changed"), tensors_of(folder))
    assert changed == "model.layers.2.self_attn.o_proj.weight"


def changed_copy(folder: Path, to: Path, **fields: Any) -> Path:
    """A directory whose config.json has other fields."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    rope = config["rope_parameters"]
    for name, value in fields.items():
        (rope if name in {*rope, "factor"} else config)[name] = value
    (to / "config.json").write_text(json.dumps(config))
    return to


OTHERS: list[dict[str, Any]] = [
    {"rope_theta": 20000.0},
    {"rope_type": "linear", "factor": 2.0},
    {"rms_norm_eps": 1e-5},
    {"num_key_value_heads": 4},
    {"head_dim": 6},
    {"num_attention_heads": 8},
    {"vocab_size": 61},
    {"tie_word_embeddings": True},
    {"intermediate_size": 96},
    {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
]


def test_config_json_of_another_model(library, directory, tmp_path):
    bridge, worker = library
    folder = directory("qwen3")
    others = [changed_copy(folder, tmp_path / str(n), **fields) for n, fields in enumerate(OTHERS)]
    (said,) = worker.run(refusals, 1, bridge, folder, [*others, folder], timeout_s=180)
    assert said.pop() == ""
    for message, fields, other in zip(said, OTHERS, others, strict=True):
        name = {"intermediate_size": "ffn_hidden_size"}.get(next(iter(fields)), next(iter(fields)))
        assert message.startswith(f"{other / 'config.json'}: ")
        assert name in message


def test_what_a_bridge_does_not_know(library, directory, tmp_path):
    bridge, worker = library
    title = f"{bridge} {VERSIONS[bridge]}"
    make("qwen3_moe", dense := tmp_path / "dense")  # the layer in the middle has no experts
    (said,) = worker.run(refusals, 1, bridge, dense, [dense], timeout_s=180)
    assert f"{title} has no name for decoder.layers.1.mlp.linear_fc1.weight" in said[0]
    unknown = "gpt_oss" if bridge == "mbridge" else "mixtral"
    make(unknown, tmp_path / unknown)
    folder = directory("qwen3_moe")
    ranks = worker.run(refusals, 2, bridge, folder, [tmp_path / unknown], LAYOUTS["EP2"][1])
    assert ranks[0] == ranks[1]
    assert f"--hf-bridge {bridge}: {title} does not know the" in ranks[0][0]
    other = changed_copy(folder, tmp_path / "other", model_type="olmo", architectures=["Olmo"])
    (said,) = worker.run(refusals, 1, "auto", folder, [other])
    assert f"{title} does not know the" in said[0]
    absent = next(name for name in VERSIONS if name != bridge)
    assert f"{absent} is not installed (pip install {absent})" in said[0]
    (said,) = worker.run(refusals, 1, absent, folder, [folder])
    assert f"--hf-bridge {absent}: {absent} is not installed" in said[0]


def test_a_directory_with_other_tensors(library, directory, tmp_path):
    bridge, worker = library
    folder, lost = directory("qwen3_moe"), "model.layers.2.mlp.experts.5.up_proj.weight"
    whole = tensors_of(folder)
    wrong = {
        "lost": {name: tensor for name, tensor in whole.items() if name != lost},
        "more": {**whole, "model.layers.2.mlp.experts.8.up_proj.weight": whole[lost].clone()},
        "shape": {**whole, lost: whole[lost][:8].clone()},
        "nan": {**whole, lost: whole[lost] * torch.nan},
    }
    for name, tensors in wrong.items():
        (tmp_path / name).mkdir()
        shutil.copy(folder / "config.json", tmp_path / name)
        save_file(tensors, tmp_path / name / "model.safetensors", {"format": "pt"})
    layout = LAYOUTS["EP2"][1]
    folders = [tmp_path / name for name in wrong]
    ranks = worker.run(refusals, 2, bridge, folder, folders, layout, timeout_s=180)
    assert ranks[0] == ranks[1]
    said = dict(zip(wrong, ranks[0], strict=True))
    assert lost in said["lost"]
    assert "experts.8.up_proj" in said["more"]
    assert "decoder.layers.2.mlp.experts.experts.linear_fc1.weight of expert 5" in said["shape"]
    assert f"values of {lost} are not finite" in said["nan"]


def test_a_bridge_that_is_wrong_is_found(library, directory, tmp_path):
    bridge, worker = library
    out = tmp_path / "out"
    (said,) = worker.run(wrong_translations, 1, bridge, directory("qwen3_moe"), out, timeout_s=180)
    rounds, swaps, loses = said
    assert "changes embedding.word_embeddings.weight in a conversion and its inverse" in rounds
    assert "give Megatron the arguments of the model" in swaps
    assert "makes [] of embedding.word_embeddings.weight" in loses
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def policy(library: tuple[str, TreeWorker], once: Once) -> Policy:
    """A policy of the demo's model, whose layers all have experts."""
    made = once("bridged policy", lambda folder: make_policy(library[1], folder, iterations=2))
    return Policy.within(made)


def published_by(
    worker: TreeWorker, policy: Policy, folder: Path, steps: int, ranks: int, choice: str | None
) -> dict[str, dict[str, str]]:
    """Train on the policy's rollouts and publish; the digests of each version's files."""
    store = folder / "store" if (folder / "store").exists() else stores(policy, folder, mixed=True)
    argv = steps_on(policy, store, steps, "--rollouts-publish", str(folder / "policies"))
    argv += ["--rollouts-publish-like", str(policy.hf), "--rollouts-follow", "20"]
    argv += ["--expert-model-parallel-size", str(ranks)]
    env = {} if choice is None else {"MEGATRON_R3_HF_BRIDGE": choice}
    worker.run(train, ranks, argv, timeout_s=180, env=env)
    policies = folder / "policies"
    found = {}
    for version in published(policies):
        one = read_policy(policies, version)
        one.check_files()
        found[version_name(version)] = dict(one.files)
    return found


def test_a_training_publishes_through_a_bridge(library, policy, tmp_path):
    bridge, worker = library
    kinds: dict[str, str | None] = {"own": None, "through": bridge}
    made = {}
    for kind, choice in kinds.items():
        (tmp_path / kind).mkdir()
        made[kind] = published_by(worker, policy, tmp_path / kind, 1, 2, choice)
    assert made["own"] == made["through"]
    assert len(made["own"]) == 2  # before the step, and after it
    assert len({files["model-00002-of-00006.safetensors"] for files in made["own"].values()}) == 2
    # again, by the other way: the versions that are there are compared, and are the same
    again = published_by(worker, policy, tmp_path / "own", 1, 2, bridge)
    assert again == made["own"]
    with pytest.raises(RankError, match="MEGATRON_R3_HF_BRIDGE is 'x'; expected one of auto,"):
        published_by(worker, policy, tmp_path / "own", 1, 1, "x")
