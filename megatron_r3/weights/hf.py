"""Export a Megatron checkpoint of a Qwen3-MoE as a transformers directory, or import one.

As a script, in one process; the first line exports, the second imports:

    torchrun --nproc-per-node 1 megatron_r3/weights/hf.py --hf-export DIR --load CKPT MODEL_ARGS
    torchrun --nproc-per-node 1 megatron_r3/weights/hf.py --hf-import DIR --save CKPT \\
        --save-interval 1 MODEL_ARGS

What is written is there whole or not at all, and holds what was loaded. Otherwise the script ends
with one `error:` line and status 1.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_r3.launch import build_model, initialize
from megatron_r3.untrusted import one_line, quoted, read_json
from megatron_r3.weights import qwen3_moe
from megatron_r3.weights.checkpoint import check_load, check_save, load_whole, save_whole
from megatron_r3.weights.qwen3_moe import VOCABULARY, check_config, hf_config, tensor_names

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# the fields of config.json that the shapes of the tensors do not show
_NO_SHAPES = {"head_dim", "norm_topk_prob", "num_attention_heads", "num_experts_per_tok"}
_NO_SHAPES |= {"num_key_value_heads", "rms_norm_eps", "rope_theta", "vocab_size"}


def to_hf(model: torch.nn.Module, directory: Path, config_json: dict[str, Any]) -> None:
    """Write a whole (one-process) GPTModel as a transformers directory in bfloat16.

    Args:
        directory: it is there whole afterwards, or not at all.
        config_json: `hf_config(...)`; its vocab_size says where vocabulary padding is cut off.

    Raises:
        ValueError: `directory` is in use or cannot be written, a weight is not finite, or the
            model is not a Qwen3-MoE.
    """
    check_target(directory)
    config, state = model.config, model.state_dict()
    check_config(config)
    tensors: dict[str, Tensor] = {}
    for name, parts in tensor_names(config, state).items():
        whole = state[name][: config_json["vocab_size"]] if name in VOCABULARY else state[name]
        for part, tensor in zip(parts, qwen3_moe.split(name, whole, config), strict=True):
            # a clone, because safetensors refuses tensors that share memory
            tensors[part] = tensor.detach().cpu().to(torch.bfloat16).contiguous().clone()
            _refuse_non_finite(part, tensors[part], "the model in bfloat16")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as t:
            # The temporary folder is private to its owner. A folder made inside it has the
            # permissions of any new folder, and it is this one that gets the name.
            inner = Path(t) / "whole"
            inner.mkdir()
            save_file(tensors, inner / "model.safetensors", {"format": "pt"})
            (inner / "config.json").write_text(json.dumps(config_json, indent=2) + "\n")
            inner.rename(directory)  # this works over an empty folder too
    except (SafetensorError, OSError) as error:
        reason = one_line(str(error), 500)
        raise ValueError(
            f"{directory}: cannot be written; nothing is left there ({reason})"
        ) from error


def check_target(directory: Path) -> None:
    """Refuse to write a transformers directory over something.

    Raises:
        ValueError: `directory` is a file, or not empty.
    """
    if directory.is_symlink() or (
        directory.exists() and (not directory.is_dir() or any(directory.iterdir()))
    ):
        raise ValueError(
            f"{directory}: there is something already: move it away, or choose another folder"
        )


def from_hf(
    model: torch.nn.Module,
    directory: Path,
    vocab_size: int | None = None,
    rope_theta: float | None = None,
) -> None:
    """Load a transformers Qwen3-MoE directory into a whole (one-process) GPTModel.

    Args:
        vocab_size, rope_theta: what config.json must say; None where the caller does not know.

    Raises:
        ValueError: a tensor is missing, has another shape or dtype or is not finite, or
            config.json says another model; the model is then unchanged.
    """
    config, state = model.config, model.state_dict()
    _check_described(hf_config(config, vocab_size, rope_theta, 0), directory)
    names = tensor_names(config, state)
    theirs, loaded = _read(directory), {}
    without_place = {*theirs} - {part for parts in names.values() for part in parts}
    if without_place:
        raise ValueError(f"{directory}: the model has no place for {sorted(without_place)[:3]}")
    for name, parts in names.items():
        for part in parts:
            if part not in theirs:
                raise ValueError(f"{directory}: no tensor {part} (of Megatron's {name})")
            if theirs[part].dtype not in _DTYPES:
                raise ValueError(f"{directory}: {part} is {theirs[part].dtype}; expected {_DTYPES}")
            _refuse_non_finite(part, theirs[part], directory)
        tensor = qwen3_moe.join(name, [theirs[part] for part in parts], config)
        rows = state[name].shape[0] - tensor.shape[0]
        if rows > 0 and name in VOCABULARY:
            tensor = torch.nn.functional.pad(tensor, (0, 0, 0, rows))  # vocabulary padding
        if tensor.shape != state[name].shape:
            raise ValueError(
                f"{directory}: {parts} make {tuple(tensor.shape)}; Megatron's {name} is "
                f"{tuple(state[name].shape)}: other model arguments"
            )
        loaded[name] = tensor
    for name, tensor in loaded.items():  # now that nothing can be refused any more
        state[name].copy_(tensor)


def _check_described(expected: Mapping[str, Any], directory: Path) -> None:
    """Refuse a directory whose config.json says what the shapes of its tensors do not show."""
    file = directory / "config.json"
    if not file.is_file():
        raise ValueError(f"{directory}: no config.json")
    theirs = read_json(file.read_bytes(), str(file))
    if not isinstance(theirs, dict):
        raise ValueError(f"{file}: expected an object")
    family = theirs.get("model_type", expected["model_type"])
    if family != expected["model_type"]:
        raise ValueError(
            f"{file}: model_type is {quoted(family)}: only Qwen3-MoE models can be moved"
        )
    # transformers 5 has rope_theta in rope_parameters, earlier versions beside the other fields
    rope = theirs.get("rope_parameters")
    theirs = {**theirs, **(rope if isinstance(rope, dict) else {})}
    for name, ours in {**expected, **expected["rope_parameters"]}.items():
        if name in _NO_SHAPES and ours is not None and theirs.get(name, ours) != ours:
            raise ValueError(
                f"{file}: {name} is {quoted(theirs[name])}; Megatron's arguments "
                f"make it {ours!r}: other model arguments"
            )


def _read(directory: Path) -> dict[str, Tensor]:
    """The tensors of a transformers directory."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                tensors.update({n: file.get_tensor(n) for n in file.keys()})  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: not a whole safetensors file ({error})") from error
    if not tensors:
        raise ValueError(f"{directory}: no tensors in its *.safetensors")
    return tensors


def _refuse_non_finite(name: str, tensor: Tensor, where: object) -> None:
    finite = tensor.isfinite()
    if not finite.all():
        count = tensor.numel() - int(finite.sum())
        raise ValueError(
            f"{where}: {count} of the {tensor.numel()} values of {name} are not finite"
        )


def _arguments(parser: Any) -> Any:
    group = parser.add_argument_group(title="hf")
    group.add_argument(
        "--hf-export", type=Path, metavar="DIR", help="write --load as this transformers directory"
    )
    group.add_argument(
        "--hf-import", type=Path, metavar="DIR", help="save this transformers directory as --save"
    )
    return parser


def _run() -> None:
    try:
        args = initialize(_arguments)
    except AssertionError as error:  # how Megatron refuses most arguments
        reason = one_line(str(error)) or "no reason is given"
        raise ValueError(f"Megatron refuses these arguments: {reason}") from error
    if (args.hf_export is None) == (args.hf_import is None):
        raise ValueError("give --hf-export DIR (with --load) or --hf-import DIR (with --save)")
    if args.world_size != 1:
        raise ValueError("run it in one process; the checkpoint loads in any layout")
    # refuse what can be refused before the model is built, which takes long
    if args.hf_import is not None:
        check_save(args)
    else:
        if args.vocab_size is None:
            raise ValueError("--hf-export needs --vocab-size, the vocabulary without padding")
        check_target(args.hf_export)
        check_load(args)
    model = build_model(args)
    whole = getattr(model, "module", model)  # the model inside Megatron's 16-bit wrapper
    if args.hf_import is not None:
        from_hf(whole, args.hf_import, args.vocab_size, args.rotary_base)
        save_whole(model, args)
    else:
        positions = args.max_position_embeddings
        described = hf_config(whole.config, args.vocab_size, args.rotary_base, positions)
        load_whole(model, args)
        to_hf(whole, args.hf_export, described)


def main() -> None:
    """Export or import a checkpoint with Megatron's own arguments, which are read from `sys.argv`.

    Raises:
        SystemExit: status 1, with one line that says what is wrong.
    """
    try:
        _run()
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {one_line(str(error))}") from None


if __name__ == "__main__":
    main()
