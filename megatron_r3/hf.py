"""Weights between a transformers Qwen3-MoE directory and a Megatron GPTModel, both ways.

As a script it exports a checkpoint, in one process:

    torchrun --nproc-per-node 1 megatron_r3/hf.py --hf-export DIR --load CKPT <model arguments>

or, with `--hf-import DIR --save CKPT --save-interval 1`, writes one. What is written is there
whole or not at all, and holds what was loaded, or the script ends with one line and status 1.

Names of Megatron's local layer spec are known, and those of its Transformer Engine spec (fused
norms, grouped experts); the latter was not run.

Shape suffixes: G query groups, D head dimension, H hidden.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_r3.checkpoint import check_load, check_save, load_whole, save_whole
from megatron_r3.launch import build_model, initialize
from megatron_r3.training.layers import moe_layer_indices
from megatron_r3.untrusted import one_line, read_json

_NORMS = {
    # transformers' name: Megatron's local spec, Transformer Engine spec
    "input_layernorm.weight": (
        "input_layernorm.weight",
        "self_attention.linear_qkv.layer_norm_weight",
    ),
    "post_attention_layernorm.weight": ("pre_mlp_layernorm.weight",),
    "self_attn.q_norm.weight": ("self_attention.q_layernorm.weight",),
    "self_attn.k_norm.weight": ("self_attention.k_layernorm.weight",),
    "self_attn.o_proj.weight": ("self_attention.linear_proj.weight",),
    "mlp.gate.weight": ("mlp.router.weight",),
}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# of config.json: what the shapes of the tensors do not show
_NO_SHAPES = {"head_dim", "model_type", "norm_topk_prob", "num_attention_heads"}
_NO_SHAPES |= {"num_experts_per_tok", "num_key_value_heads", "rms_norm_eps"}
_NO_SHAPES |= {"rope_theta", "vocab_size"}
_ROOT = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}


def _check(config: Any) -> None:
    """Refuse a model that is not a Qwen3-MoE."""
    wanted = {
        "num_moe_experts": config.num_moe_experts is not None,
        "qk_layernorm": config.qk_layernorm,
        "gated_linear_unit": config.gated_linear_unit,
        "normalization=RMSNorm": config.normalization == "RMSNorm",
        "no add_bias_linear": not config.add_bias_linear,
        "no multi_latent_attention": not getattr(config, "multi_latent_attention", False),
        "softmax scores": config.moe_router_score_function == "softmax",
        "every layer MoE": len(moe_layer_indices(config)) == config.num_layers,
        "no shared experts": not config.moe_shared_expert_intermediate_size,
        "no expert bias": not config.moe_router_enable_expert_bias,
        "no routing groups": not config.moe_router_num_groups,
        "no routing scale": not config.moe_router_topk_scaling_factor,
    }
    missing = [name for name, holds in wanted.items() if not holds]
    if missing:
        raise ValueError(f"only Qwen3-MoE models go to transformers; this one lacks: {missing}")


def hf_config(
    config: Any, vocab_size: int | None, rope_theta: float | None, max_positions: int
) -> dict[str, Any]:
    """transformers' config.json of a Megatron config.

    Args:
        config: Megatron's TransformerConfig.
    """
    _check(config)
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "head_dim": config.kv_channels,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "max_position_embeddings": max_positions,
        "moe_intermediate_size": config.moe_ffn_hidden_size,
        "norm_topk_prob": not config.moe_router_pre_softmax,
        "num_attention_heads": config.num_attention_heads,
        "num_experts": config.num_moe_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_query_groups,
        "rms_norm_eps": config.layernorm_epsilon,
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": vocab_size,
    }


class _Names:
    """Both ends of every tensor of one Megatron state dict.

    Yields for each Megatron tensor its transformers parts, in the order in which Megatron joins
    them: query, key and value by query group; gate and up one after the other.
    """

    def __init__(self, config: Any, state: Mapping[str, Tensor]) -> None:
        self.config, self.state = config, state

    def __iter__(self) -> Iterator[tuple[str, list[str]]]:
        for theirs, ours in _ROOT.items():
            yield ours, [theirs]
        for layer in range(self.config.num_layers):
            ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
            for name, candidates in _NORMS.items():
                yield self._present(ours, candidates), [theirs + name]
            attention = theirs + "self_attn."
            yield (
                ours + "self_attention.linear_qkv.weight",
                [f"{attention}{part}_proj.weight" for part in "qkv"],
            )
            for expert in range(self.config.num_moe_experts):
                yield from self._expert(ours + "mlp.experts.", theirs + "mlp.experts.", expert)

    def check_covers(self) -> None:
        """Refuse a model with weights that transformers' Qwen3-MoE has no place for."""
        known = {name for name, _ in self}
        left = [n for n in self.state if n not in known and not n.endswith("_extra_state")]
        missing = sorted(known - {*self.state})
        if left or missing:
            raise ValueError(
                f"not a plain Qwen3-MoE (tied embeddings, biases, MTP?): transformers has no "
                f"place for {left[:3]}, the model has no {missing[:3]}"
            )

    def _expert(self, ours: str, theirs: str, expert: int) -> Iterator[tuple[str, list[str]]]:
        parts = {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}
        for linear, names in parts.items():
            candidates = f"local_experts.{expert}.{linear}.weight", f"{linear}.weight{expert}"
            yield self._present(ours, candidates), [f"{theirs}{expert}.{n}.weight" for n in names]

    def _present(self, prefix: str, candidates: tuple[str, ...]) -> str:
        for candidate in candidates:
            if prefix + candidate in self.state:
                return prefix + candidate
        raise ValueError(f"the model has none of {[prefix + c for c in candidates]}")


def _split(name: str, tensor: Tensor, config: Any) -> list[Tensor]:
    """A Megatron tensor's transformers parts."""
    if name.endswith("linear_qkv.weight"):
        dim, groups = config.kv_channels, config.num_query_groups
        queries = config.num_attention_heads // groups
        by_group = tensor.view(groups, queries + 2, dim, -1)  # [G, heads, D, H]
        parts = by_group.split([queries, 1, 1], dim=1)
        return [part.reshape(-1, tensor.shape[-1]) for part in parts]
    return list(tensor.chunk(2)) if "linear_fc1" in name else [tensor]


def _check_described(expected: Mapping[str, Any], directory: Path) -> None:
    """Refuse a directory whose config.json says what the shapes of its tensors do not show."""
    file = directory / "config.json"
    if not file.is_file():
        raise ValueError(f"{directory}: no config.json")
    theirs = read_json(file.read_bytes(), str(file))
    if not isinstance(theirs, dict):
        raise ValueError(f"{file}: expected an object")
    rope = theirs.get("rope_parameters")  # transformers 5; before: beside the other fields
    theirs = {**theirs, **(rope if isinstance(rope, dict) else {})}
    for name, ours in {**expected, **expected["rope_parameters"]}.items():
        if name in _NO_SHAPES and ours is not None and theirs.get(name, ours) != ours:
            raise ValueError(
                f"{file}: {name} is {one_line(repr(theirs[name]), 100)}; Megatron's arguments "
                f"make it {ours!r}: other model arguments"
            )


def _join(name: str, parts: list[Tensor], config: Any) -> Tensor:
    """The inverse of `_split`."""
    if name.endswith("linear_qkv.weight"):
        groups, hidden = config.num_query_groups, parts[0].shape[-1]
        by_group = [part.view(groups, -1, config.kv_channels, hidden) for part in parts]
        return torch.cat(by_group, dim=1).reshape(-1, hidden)
    return torch.cat(parts)


def to_hf(model: torch.nn.Module, directory: Path, config_json: dict[str, Any]) -> None:
    """Write a whole (one-process) GPTModel as a transformers directory in bfloat16.

    `directory` is there whole or not at all.

    Args:
        config_json: `hf_config(...)`; vocabulary padding is cut off to its vocab_size.

    Raises:
        ValueError: `directory` is in use or cannot be written, a weight is not finite, or the
            model is no Qwen3-MoE.
    """
    check_target(directory)
    config, state = model.config, model.state_dict()
    _check(config)
    names = _Names(config, state)
    names.check_covers()
    tensors: dict[str, Tensor] = {}
    for name, parts in names:
        for part, tensor in zip(parts, _split(name, state[name], config), strict=True):
            tensors[part] = tensor.detach().cpu().to(torch.bfloat16).contiguous().clone()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][: config_json["vocab_size"]].clone()
    for name, tensor in tensors.items():
        _refuse_non_finite(name, tensor, "the model")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as t:
            whole = Path(t) / "whole"
            whole.mkdir()  # with the permissions of any new folder; the one around it is private
            save_file(tensors, whole / "model.safetensors", {"format": "pt"})
            (whole / "config.json").write_text(json.dumps(config_json, indent=2) + "\n")
            whole.rename(directory)  # over an empty folder too
    except (SafetensorError, OSError) as error:
        text = one_line(str(error), 500)
        raise ValueError(
            f"{directory}: cannot be written; nothing is left there ({text})"
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


def _refuse_non_finite(name: str, tensor: Tensor, where: object) -> None:
    finite = tensor.isfinite()
    if not finite.all():
        count = tensor.numel() - int(finite.sum())
        raise ValueError(
            f"{where}: {count} of the {tensor.numel()} values of {name} are not finite in bfloat16"
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


def from_hf(
    model: torch.nn.Module,
    directory: Path,
    vocab_size: int | None = None,
    rope_theta: float | None = None,
) -> None:
    """Load a transformers Qwen3-MoE directory into a whole (one-process) GPTModel.

    Args:
        vocab_size, rope_theta: what config.json must say, where they are known.

    Raises:
        ValueError: a tensor is missing, has another shape or dtype or is not finite, or
            config.json says another model; the model is then unchanged.
    """
    config, state = model.config, model.state_dict()
    _check(config)
    _check_described(hf_config(config, vocab_size, rope_theta, 0), directory)
    names = _Names(config, state)
    names.check_covers()
    theirs, loaded = _read(directory), {}
    left = {*theirs} - {part for _, parts in names for part in parts}
    if left:
        raise ValueError(f"{directory}: the model has no place for {sorted(left)[:3]}")
    for name, parts in names:
        missing = [part for part in parts if part not in theirs]
        if missing:
            raise ValueError(f"{directory}: no tensor {missing[0]} (of Megatron's {name})")
        for part in parts:
            if theirs[part].dtype not in _DTYPES:
                raise ValueError(f"{directory}: {part} is {theirs[part].dtype}; expected {_DTYPES}")
            _refuse_non_finite(part, theirs[part], directory)
        tensor = _join(name, [theirs[part] for part in parts], config)
        rows = state[name].shape[0] - tensor.shape[0]
        if rows > 0 and name in (_ROOT["model.embed_tokens.weight"], _ROOT["lm_head.weight"]):
            tensor = torch.nn.functional.pad(tensor, (0, 0, 0, rows))  # vocabulary padding
        if tensor.shape != state[name].shape:
            raise ValueError(
                f"{directory}: {parts} make {tuple(tensor.shape)}; Megatron's {name} is "
                f"{tuple(state[name].shape)}: other model arguments"
            )
        loaded[name] = tensor
    for name, tensor in loaded.items():
        state[name].copy_(tensor)


def _main() -> None:
    """Export or import a checkpoint with Megatron's own arguments.

    Raises:
        SystemExit: status 1, with one line that says what is wrong.
    """
    try:
        _run()
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {one_line(str(error))}") from None


def _run() -> None:
    def add_arguments(parser: Any) -> Any:
        group = parser.add_argument_group(title="hf")
        group.add_argument("--hf-export", type=Path, metavar="DIR")
        group.add_argument("--hf-import", type=Path, metavar="DIR")
        return parser

    try:
        args = initialize(add_arguments)
    except AssertionError as error:
        text = one_line(str(error)) or "no reason is given"
        raise ValueError(f"Megatron refuses these arguments: {text}") from error
    if (args.hf_export is None) == (args.hf_import is None):
        raise ValueError("give --hf-export DIR (with --load) or --hf-import DIR (with --save)")
    if args.world_size != 1:
        raise ValueError("run it in one process; the checkpoint loads in any layout")
    if args.hf_export is None:
        check_save(args)
        model = build_model(args)
        whole = getattr(model, "module", model)  # out of the 16-bit wrapper
        from_hf(whole, args.hf_import, args.vocab_size, args.rotary_base)
        save_whole(model, args)
        return
    if args.vocab_size is None:
        raise ValueError("--hf-export needs --vocab-size, the vocabulary without padding")
    check_target(args.hf_export)
    check_load(args)
    model = build_model(args)
    whole = getattr(model, "module", model)
    positions = args.max_position_embeddings
    described = hf_config(whole.config, args.vocab_size, args.rotary_base, positions)
    load_whole(model, args)
    to_hf(whole, args.hf_export, described)


if __name__ == "__main__":
    _main()
