"""A policy that ranks of any layout write has the bytes that one process writes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from once import Once
from publish_layouts import (
    DENSE,
    LAYOUTS,
    read_wrong,
    save,
    write_after_training,
    write_and_read,
    write_between_steps,
    write_changed,
    write_like,
    write_other_model,
)
from safetensors.torch import load_file, save_file
from training import export

from demo.model import arguments
from proof.fidelity.rig.worker import TreeWorker

Saved = tuple[Path, Path]  # Megatron's checkpoint, and the policy that one process wrote


def _saved(patched: TreeWorker, once: Once, name: str, options: dict[str, Any]) -> Saved:
    def make(folder: Path) -> None:
        given = (folder / "checkpoint", folder / "policy", options)
        patched.run(save, 1, *given, timeout_s=120)

    folder = once(name, make)
    return folder / "checkpoint", folder / "policy"


@pytest.fixture(scope="module")
def saved(patched: TreeWorker, once: Once) -> Saved:
    return _saved(patched, once, "publish", {})


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_writes_and_reads_the_same_policy(patched, once, tmp_path, name):
    """With a dense first layer, for which Megatron has the layers' numbers in the keys."""
    checkpoint, policy = _saved(patched, once, "publish-dense", DENSE)
    ranks, sizes = LAYOUTS[name]
    args = (sizes, DENSE, checkpoint, policy, tmp_path / "out")
    answers = patched.run(write_and_read, ranks, *args, timeout_s=120)
    assert files(tmp_path / "out") == files(policy)
    assert answers == [(True, False)] * ranks
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_for_each_layer(saved: Saved) -> None:
    names = {file.name: set(load_file(file)) for file in saved[1].glob("*.safetensors")}
    assert sorted(names) == [f"model-0000{i}-of-00006.safetensors" for i in range(1, 7)]
    assert names["model-00001-of-00006.safetensors"] == {"model.embed_tokens.weight"}
    assert names["model-00006-of-00006.safetensors"] == {"model.norm.weight", "lm_head.weight"}
    for layer in range(4):
        of_layer = names[f"model-0000{layer + 2}-of-00006.safetensors"]
        assert all(name.startswith(f"model.layers.{layer}.") for name in of_layer)


def test_a_swapped_expert_shows(patched: TreeWorker, saved: Saved, tmp_path: Path) -> None:
    _, sizes = LAYOUTS["EP2"]
    for change, differing in (("nothing", set()), ("an expert swapped", {"model-00005-of-00006"})):
        out = tmp_path / change
        assert patched.run(write_changed, 2, sizes, saved[1], out, change) == ["", ""]
        theirs, ours = files(saved[1]), files(out)
        assert {n.partition(".")[0] for n in ours if ours[n] != theirs[n]} == differing


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("PP2", "full disk", ("cannot be written; nothing is left there", "(on rank 1)")),
        # the rank that writes sees it, not the one that has the expert
        ("EP2", "nan", ("32 of the 512 values of model.layers.3.mlp.experts.4.gate_proj",)),
        ("PP2xEP2", "nan", ("the model in bfloat16: 32 of the 512 values", "(on rank 2)")),
    ],
)
def test_a_write_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(
    patched: TreeWorker, saved: Saved, tmp_path: Path, name: str, change: str, words: tuple
) -> None:
    ranks, sizes = LAYOUTS[name]
    said = patched.run(write_changed, ranks, sizes, saved[1], tmp_path / "out", change)
    assert set(said) == {said[0]}
    assert all(word in said[0] for word in words), said[0]
    assert not list(tmp_path.iterdir())


def test_what_a_killed_writer_left_is_removed(patched, saved, tmp_path):
    left = tmp_path / ".out.part"
    left.mkdir()
    (left / "model-00001-of-00006.safetensors").write_text("half")
    assert patched.run(write_changed, 1, {}, saved[1], tmp_path / "out", "nothing") == [""]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert files(tmp_path / "out") == files(saved[1])


def test_a_read_that_fails_on_one_rank_changes_nothing_on_any(patched, saved, tmp_path):
    changed = tmp_path / "changed"
    shutil.copytree(saved[1], changed)
    file = changed / "model-00005-of-00006.safetensors"
    tensors = load_file(file)
    tensors["model.layers.3.mlp.experts.7.up_proj.weight"][0] *= float("nan")
    save_file(tensors, file)
    said = patched.run(read_wrong, 2, LAYOUTS["EP2"][1], changed)
    assert set(said) == {said[0]}
    assert "32 of the 512 values of model.layers.3.mlp.experts.7.up_proj.weight" in said[0]
    assert "(on rank 1)" in said[0]  # which holds this expert


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("tied", "needs untied embeddings"),
        ("mtp", "needs no mtp_num_layers"),
        ("fsdp", "the model is wrapped in FSDPGPTModel"),
    ],
)
def test_a_model_that_cannot_be_moved_is_refused(patched, tmp_path, kind, words):
    (said,) = patched.run(write_other_model, 1, kind, tmp_path / "out")
    assert words in said
    assert not list(tmp_path.iterdir())


def test_the_config_of_another_model_is_refused(patched, saved, tmp_path):
    shutil.copytree(saved[1], tmp_path / "like")
    assert patched.run(write_like, 1, saved[1], tmp_path / "like", tmp_path / "out") == [""]
    assert files(tmp_path / "out") == files(saved[1])
    file = tmp_path / "like" / "config.json"
    file.write_text(
        file.read_text().replace('"num_experts_per_tok": 2', '"num_experts_per_tok": 4')
    )
    (said,) = patched.run(write_like, 1, saved[1], tmp_path / "like", tmp_path / "other")
    assert f"{file}: num_experts_per_tok is 4; Megatron's arguments say 2" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["like", "out"]


SHORT = ["--bf16", "--micro-batch-size", "4", "--global-batch-size", "16", "--train-iters", "2"]
SHORT += ["--lr", "1e-2", "--save-interval", "1000"]
PP2XEP2 = ["--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2"]


def test_a_training_publishes_what_its_checkpoint_exports(patched, policy, tmp_path):
    """In bfloat16, wrapped for data parallelism, on four ranks; exported in one process."""
    like = tmp_path / "like"
    shutil.copytree(policy.hf, like)
    (like / "tokenizer.json").write_text("{}")
    (like / "pytorch_model.bin").write_text("weights")
    save = ["--save", str(tmp_path / "checkpoint")]
    argv = arguments(SHORT, PP2XEP2, save)
    told = patched.run(write_after_training, 4, argv, tmp_path / "out", like, timeout_s=240)
    load = ["--micro-batch-size", "1", "--load", str(tmp_path / "checkpoint")]
    load += ["--hf-export", str(tmp_path / "hf")]
    patched.run(export, 1, arguments(load), timeout_s=120)
    published, exported = files(tmp_path / "out"), files(tmp_path / "hf")
    assert published.keys() - exported.keys() == {"tokenizer.json", "policy.json"}
    assert all(published[name] == data for name, data in exported.items())
    assert exported != files(policy.hf)  # it is the new weights that are compared
    assert told == [sorted(published.keys() - {"policy.json"}), [], [], []]


@pytest.mark.slow
def test_updates_that_ranks_have_not_taken_from_each_other_yet(patched, tmp_path):
    argv = arguments(SHORT, ["--train-iters", "3", "--use-distributed-optimizer"])
    overlap = ["--overlap-grad-reduce", "--overlap-param-gather"]
    runs: list[tuple[str, list[str], bool]] = [
        ("at once", [], True),
        ("overlapped", overlap, True),
        ("too early", overlap, False),  # the control
    ]
    for name, more, whole in runs:
        args = ([*argv, *more], tmp_path / name, whole)
        patched.run(write_between_steps, 2, *args, timeout_s=240)
    at_once, overlapped, too_early = (files(tmp_path / name) for name, *_ in runs)
    assert overlapped == at_once
    assert too_early != at_once
