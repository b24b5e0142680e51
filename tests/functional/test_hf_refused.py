"""An export or an import of weights that cannot be right ends with one line, and writes nothing."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import refusals
from safetensors.torch import load_file, save_file
from training import Policy, export, trained_with

from demo.model import arguments
from proof.fidelity.rig.worker import TreeWorker

ONE = ["--micro-batch-size", "1"]
EP2 = ["--expert-model-parallel-size", "2"]


def refused_in_two(rank: int, argv: list[str]) -> str | int:
    """What each rank ends with; the first has the line."""
    with pytest.raises(SystemExit) as ended:
        export(rank, argv)
    assert ended.value.code is not None
    return ended.value.code


def test_an_export_in_two_processes_that_is_refused(patched, policy, tmp_path):
    argv = [*ONE, "--hf-export", str(tmp_path / "hf"), "--load", str(policy.checkpoint), *EP2]
    argv += ["--moe-router-topk", "2", "--finetune"]
    line, code = patched.run(refused_in_two, 2, arguments(argv), timeout_s=120)
    assert line.startswith("error: ")
    assert "it has moe_router_topk 4" in line
    assert code == 1
    assert not list(tmp_path.iterdir())


def refused(rank: int, argv: list[str], most_bytes: int | None = None) -> str:
    """What the script ends with, where no file may be longer than `most_bytes`."""
    if most_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    with pytest.raises(SystemExit) as ended:
        export(rank, argv)
    assert isinstance(ended.value.code, str)  # python prints it and exits with 1
    return ended.value.code


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def refuses_export(
    patched: TreeWorker, tmp_path: Path, load: list[str], *words: str, **more: Any
) -> str:
    """The export says one line with all of `words`, and writes nothing."""
    target = tmp_path / "out" / "hf"
    target.parent.mkdir(exist_ok=True)
    argv = arguments([*ONE, "--hf-export", str(target), *load])
    (line,) = patched.run(refused, 1, argv, timeout_s=120, **more)
    assert line.startswith("error: ")
    assert "\n" not in line
    for word in words:
        assert word in line, line
    assert not list(target.parent.iterdir())
    return line


def refuses_import(
    patched: TreeWorker, source: Path, save: list[str], *words: str, **more: Any
) -> None:
    argv = arguments([*ONE, "--hf-import", str(source), "--save-interval", "1", *save])
    before = everything(source) if source.exists() else {}
    (line,) = patched.run(refused, 1, argv, timeout_s=120, **more)
    assert line.startswith("error: ")
    assert "\n" not in line
    for word in words:
        assert word in line, line
    assert (everything(source) if source.exists() else {}) == before


def test_an_export_without_a_checkpoint_writes_nothing(patched: TreeWorker, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refuses_export(patched, tmp_path, [], "--load is missing: name the folder")
    for folder in ("nowhere", "empty"):
        load = ["--load", str(tmp_path / folder)]
        refuses_export(patched, tmp_path, load, str(tmp_path / folder), "there is no checkpoint")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (["--num-layers", "2"], ("layer_norm_weight is (4, 128)", "(2, 128): give the")),
        (["--moe-router-topk", "2", "--finetune"], ("it has moe_router_topk 4", "say 2")),
        (["--rotary-base", "500000"], ("it has rotary_base 10000", "say 500000")),
        (["--ckpt-step", "7"], ("cannot be loaded into this model", "iter_0000007")),
    ],
)
def test_an_export_with_arguments_of_another_model(patched, policy, tmp_path, other, words):
    load = ["--load", str(policy.checkpoint), *other]
    refuses_export(patched, tmp_path, load, str(policy.checkpoint), *words)


# What a checkpoint was trained with and an export forgets: nothing but its arguments shows these.
FORGOTTEN: dict[str, Any] = {
    "rotary_percent": 0.5,
    "rotary_seq_len_interpolation_factor": 2,
    "use_rope_scaling": True,
    "moe_router_topk_scaling_factor": 2.5,
    "window_size": (4, 0),
    "moe_router_score_function": "sigmoid",
    "moe_router_num_groups": 4,
    "rotary_interleaved": True,
    "no_rope_freq": 2,
    "softmax_type": "off-by-one",
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
    "use_mup": True,
    "position_embedding_type": "none",
    "moe_expert_capacity_factor": 1.0,
    "moe_router_load_balancing_type": "sinkhorn",
    "spec": ["a", "b"],
    "made_up": 2,  # of a newer Megatron, which reads it; the export has 1
    "num_query_groups": None,
}
SAME = {"made_up": 1, "moe_router_load_balancing_type": ["none"], "attention_dropout": 0.1}
SAME |= {"tensor_model_parallel_size": 2, "moe_input_jitter_eps": 0.1, "bf16": True, "seed": 7}


def test_arguments_that_a_checkpoint_was_trained_with(patched: TreeWorker, policy: Policy) -> None:
    changes = [{}, *({name: value} for name, value in {**SAME}.items())]
    changes += [{"vocab_size": None}]  # Megatron sets none of a tokenizer's
    changes += [{"softmax_type": "missing"}]  # an older release that had only the default
    changes += [{"quick_geglu": "missing"}]  # an argument that is no field, and off
    # a checkpoint of 0.15 calls it so
    changes += [{"layernorm_epsilon": "missing", "norm_epsilon": 1e-6}]
    others = [{name: value} for name, value in FORGOTTEN.items()]
    others += [{"layernorm_epsilon": "missing", "norm_epsilon": 1e-5}]
    others += [{"qk_layernorm": "missing"}]
    argv = (arguments(ONE), policy.checkpoint, [*changes, *others])
    (said,) = patched.run(differences, 1, *argv, timeout_s=120)
    assert said[: len(changes)] == [[]] * len(changes)
    assert said[len(changes) :] == [[next(iter(change))] for change in others]


def differences(
    rank: int, argv: list[str], checkpoint: Path, changes: list[dict[str, Any]]
) -> list[list[str]]:
    """Which arguments differ from a checkpoint's own, after each change of its own."""
    from megatron.core.dist_checkpointing.serialization import load_common_state_dict

    from megatron_r3.train import launch
    from megatron_r3.weights.known import differing

    sys.argv = ["hf.py", *argv]
    args = launch.initialize()
    args.made_up, config_of = 1, launch._builder_config
    launch._builder_config = lambda args: (args.made_up, config_of(args))[1]
    names = launch.built_from(args)
    (folder,) = checkpoint.glob("iter_*")
    found = []
    for change in changes:
        saved = load_common_state_dict(folder)["args"]
        vars(saved).update({"made_up": 1, **change})
        for name in [name for name, value in change.items() if value == "missing"]:
            delattr(saved, name)
        found.append([name for name, _, _ in differing(saved, args, names)])
    return found


def test_an_export_that_forgets_an_argument(patched, torch_checkpoint, tmp_path):
    shutil.copytree(torch_checkpoint, tmp_path / "changed")
    patched.run(trained_with, 1, tmp_path / "changed", "rotary_percent", 0.5)
    said = "it has rotary_percent 0.5, the arguments say 1.0: give the checkpoint's values"
    load = ["--load", str(tmp_path / "changed"), "--ckpt-format", "torch"]
    refuses_export(patched, tmp_path, load, said)
    load += ["--rotary-percent", "0.5"]
    refuses_export(patched, tmp_path, load, "not a qwen3_moe model, which needs rotary_percent=1.0")


def changed_metadata(source: Path, target: Path, old: str, new: str = "") -> list[str]:
    """A torch_dist checkpoint that has the tensor `old` as `new` too, or not at all."""
    shutil.copytree(source, target)
    (file,) = target.glob("iter_*/.metadata")
    metadata = pickle.loads(file.read_bytes())
    entry = metadata.state_dict_metadata.pop(old)
    if new:
        metadata.state_dict_metadata |= {old: entry, new: entry}
    file.write_bytes(pickle.dumps(metadata))
    return ["--load", str(target)]


NORM = "decoder.final_layernorm.weight"


def test_an_export_of_a_distributed_checkpoint_that_lacks_a_tensor(patched, policy, tmp_path):
    load = changed_metadata(policy.checkpoint, tmp_path / "changed", NORM)
    load += ["--dist-ckpt-strictness", "ignore_all"]
    refuses_export(patched, tmp_path, load, f"it has no {NORM} (tensors that it lacks: 1)")


def test_an_export_of_a_distributed_checkpoint_with_another_tensor(patched, policy, tmp_path):
    bias = "decoder.layers.self_attention.linear_proj.bias"
    load = changed_metadata(policy.checkpoint, tmp_path / "changed", NORM, bias)
    refuses_export(patched, tmp_path, load, f"no place for its {bias}")


def change_file(rank: int, folder: Path, change: str) -> None:
    """In a rank: what is pickled in the file are Megatron's types."""
    (file,) = folder.glob("iter_*/*/*.pt")
    saved = torch.load(file, weights_only=False)
    CHANGES[change][0](saved["model"])
    torch.save(saved, file)


CHANGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (lambda model: model.pop(NORM), f"it has no {NORM}"),
    "another": (lambda model: model.update({"decoder.x": torch.ones(2)}), "its decoder.x"),
    "nan": (lambda model: model[NORM][3:5].fill_(torch.nan), f"2 of the 128 values of {NORM}"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_export_of_a_checkpoint_in_one_file_that_is_not_the_models(
    patched: TreeWorker, torch_checkpoint: Path, tmp_path: Path, change: str
) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(torch_checkpoint, changed)
    patched.run(change_file, 1, changed, change)
    load = ["--load", str(changed), "--ckpt-format", "torch"]
    refuses_export(patched, tmp_path, load, CHANGES[change][1])


def test_an_export_does_not_write_over_another(patched, policy, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine").write_text("mine")
    out = [*ONE, "--hf-export", str(tmp_path / "hf"), "--load", str(policy.checkpoint)]
    (line,) = patched.run(refused, 1, arguments(out), timeout_s=120)
    assert line.startswith(f"error: {tmp_path / 'hf'}: something is there already: move it away")
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["mine"]
    (tmp_path / "hf" / "mine").unlink()
    patched.run(export, 1, arguments(out), timeout_s=120)  # an empty folder is none
    assert len(list((tmp_path / "hf").iterdir())) == 2 + 6  # config, index, 4 layers and 2 files
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert (tmp_path / "hf").stat().st_mode & 0o777 == 0o777 & ~umask()


def umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


def test_an_export_and_an_import_on_a_full_disk(patched, policy, tmp_path):
    """A limit on the size of a file fails a write where a full disk does."""
    load = ["--load", str(policy.checkpoint)]
    line = refuses_export(patched, tmp_path, load, "nothing is left there", most_bytes=1 << 18)
    assert line.startswith(f"error: {tmp_path / 'out' / 'hf'}: cannot be written")
    save = tmp_path / "checkpoint"
    words = (f"--save {save}", "the checkpoint cannot be written")
    refuses_import(patched, policy.hf, ["--save", str(save)], *words, most_bytes=1 << 20)
    assert not list(save.rglob("*"))


def test_an_import_without_a_place_for_it(patched, policy, tmp_path):
    refuses_import(patched, policy.hf, [], "--hf-import needs --save DIR")
    (tmp_path / "file").write_text("")
    below = ["--save", str(tmp_path / "file" / "checkpoint")]
    refuses_import(patched, policy.hf, below, below[1], "is a file: name another folder")
    before = everything(policy.checkpoint)
    there = ["--save", str(policy.checkpoint)]
    refuses_import(patched, policy.hf, there, there[1], "there is a checkpoint already")
    assert everything(policy.checkpoint) == before


def _with(name: str, value: Any) -> Any:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, name: value}))

    return change


TENSOR = "model.norm.weight"
LAST = "model-00006-of-00006.safetensors"  # with the last norm and the head


def _tensor(change: Any) -> Any:
    """The last norm becomes the tensors that `change` makes of it."""

    def on_file(folder: Path) -> None:
        tensors = load_file(folder / LAST)
        made = change(tensors.pop(TENSOR))
        save_file({**tensors, **made}, folder / LAST)
        (folder / "model.safetensors.index.json").unlink()  # it names the tensors too

    return on_file


# other fields of config.json: tests/unit/weights/test_families.py, test_families.py
IMPORTS = {
    "gone": (shutil.rmtree, ("no config.json",)),
    "no file": (lambda f: (f / LAST).unlink(), (LAST, "cannot be read as safetensors")),
    "cut": (lambda f: os.truncate(f / LAST, 5000), ("cannot be read as safetensors",)),
    "family": (_with("model_type", "gpt2"), ("is 'gpt2', which is not among this project's",)),
    "quantized": (_with("quantization_config", {"bits": 4}), ("has quantization_config",)),
    "index": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}'),
        ("'../b' is no file of this folder",),
    ),
    "topk": (_with("num_experts_per_tok", 2), ("num_experts_per_tok is 2", "arguments say 4")),
    "nan": (_tensor(lambda t: {TENSOR: t * torch.nan}), (f"values of {TENSOR} are not finite",)),
    "int": (_tensor(lambda t: {TENSOR: t.to(torch.int8)}), (f"{TENSOR} is torch.int8",)),
    "missing": (
        _tensor(lambda t: {}),
        (f"no tensor {TENSOR} (needed for Megatron's decoder.final_",),
    ),
    "unknown": (
        _tensor(lambda t: {TENSOR: t, "x": t.clone()}),
        ("the model has no place for ['x']",),
    ),
    "shape": (_tensor(lambda t: {TENSOR: t[1:]}), (f"['{TENSOR}'] make (127,)", "is (128,)")),
}


def test_an_import_of_what_is_not_this_model(patched, policy, tmp_path):
    """By the script once; all others are read into one model, which stays as it was."""
    folders = {}
    for name, (edit, _) in IMPORTS.items():
        folders[name] = shutil.copytree(policy.hf, tmp_path / name)
        edit(folders[name])
    by_script = str(folders.pop("family"))
    (said,) = patched.run(refusals, 1, policy.hf, [*folders.values()], timeout_s=120)
    for name, text in zip(folders, said, strict=True):
        assert "\n" not in text
        for word in (str(folders[name]), *IMPORTS[name][1]):
            assert word in text, (name, text)
    save = ["--save", str(tmp_path / "checkpoint")]
    refuses_import(patched, Path(by_script), save, by_script, *IMPORTS["family"][1])
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("which", [[], ["--hf-export", "a", "--hf-import", "b"]])
def test_an_export_or_an_import(patched: TreeWorker, which: list[str]) -> None:
    (line,) = patched.run(refused, 1, arguments([*ONE, *which]), timeout_s=120)
    assert line == "error: give --hf-export DIR (with --load) or --hf-import DIR (with --save)"
