"""A tiny random transformers model of each family, and the same weights in Megatron.

Megatron is imported only inside the functions that ranks run.

Shape suffixes (docs/glossary.md): B, S, E.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from megatron_r3.cpu import CPU_ARGS
from megatron_r3.weights.families import FAMILIES

VOCABULARY, SEQUENCE, BATCH = 60, 16, 2

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,  # Megatron pads it to 64
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "intermediate_size": 48,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_QWEN = {"moe_intermediate_size": 16, "num_experts": 8}
_SIGMOID = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
_DEEPSEEK = {
    **_SIGMOID,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
}
_YARN = {"rope_theta": 10000, "rope_type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1}
_YARN |= {"original_max_position_embeddings": 4096, "mscale": 0.7, "mscale_all_dim": 1.0}
_KIMI_YARN = {**_YARN, "factor": 32, "beta_fast": 1.0, "original_max_position_embeddings": 256}
_DEEPSEEK_V2 = {**_DEEPSEEK, "n_group": 1, "topk_group": 1, "rope_parameters": _YARN}
_GLM = {**_SIGMOID, "head_dim": 12, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}

# of each model: the type, and the fields of its config beside _SIZES
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "qwen3_moe",
        {**_QWEN, "head_dim": 12, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {**_QWEN, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    ),
    "qwen2_moe normalised, no bias": (
        "qwen2_moe",
        {
            **_QWEN,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": True,
            "qkv_bias": False,
        },
    ),
    "mixtral": ("mixtral", {"intermediate_size": 16, "num_local_experts": 8, "head_dim": 12}),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK),
    "deepseek_v3 yarn, no groups": (
        "deepseek_v3",
        {**_DEEPSEEK, "n_group": 1, "topk_group": 1, "rope_parameters": _YARN},
    ),
    "deepseek_v3 without q_lora": (  # Moonlight
        "deepseek_v3",
        {**_DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    ),
    "kimi_k2": (
        "deepseek_v3",
        {**_DEEPSEEK, "n_group": 1, "topk_group": 1, "rope_parameters": _KIMI_YARN},
    ),
    "deepseek_v2": ("deepseek_v2", _DEEPSEEK_V2),
    "deepseek_v2 without q_lora": ("deepseek_v2", {**_DEEPSEEK_V2, "q_lora_rank": None}),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {
            **{k: v for k, v in _DEEPSEEK.items() if k != "first_k_dense_replace"},
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "glm4_moe": ("glm4_moe", {**_GLM, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe without norms": ("glm4_moe", _GLM),
    "gpt_oss": (
        "gpt_oss",
        {"intermediate_size": 16, "num_local_experts": 8, "head_dim": 12, "sliding_window": 4},
    ),
}

# the arguments of "qwen3" below, which is no family of this project
QWEN3 = """
--num-layers 3 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --group-query-attention
--kv-channels 12 --ffn-hidden-size 48 --norm-epsilon 1e-6 --rotary-base 10000 --vocab-size 60
--max-position-embeddings 64 --qk-layernorm --swiglu --disable-bias-linear --normalization RMSNorm
--position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0
--hidden-dropout 0
"""
# ... of which mbridge and Megatron-Bridge have names for every tensor (tests/clients)
BRIDGED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {**_QWEN, "head_dim": 12, "norm_topk_prob": True}),
    "glm4_moe": MODELS["glm4_moe"],
    "qwen3": ("qwen3", {"head_dim": 12}),
}


@dataclass(frozen=True)
class Computed:
    """What a model computes of `tokens()`.

    Attributes:
        logits: [B, S, vocabulary].
        routes_BSE: of each MoE layer, which experts a token went to.
    """

    logits: torch.Tensor
    routes_BSE: list[torch.Tensor]


def tokens() -> torch.Tensor:
    """Random tokens [B, S]."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator)


def make(name: str, folder: Path, models: Mapping[str, Any] = MODELS) -> None:
    """Write a model of which no weight is trivial, in float32."""
    model_type, fields = models[name]
    config = transformers.AutoConfig.for_model(model_type, **{**_SIZES, **fields})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():  # buffers too: the correction bias is one
            tensor.copy_(torch.randn_like(tensor) * 0.2 + ("norm" in key))
    model.save_pretrained(folder)
    if name == "kimi_k2":
        call_kimi(folder)


def call_kimi(folder: Path) -> None:
    """Have a DeepSeek-V3 be a Kimi-K2: the same by another name, of which transformers has none."""
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "model_type": "kimi_k2"}))


def load(folder: Path, **more: Any) -> Any:
    """The transformers model of a directory; `more` is for `from_pretrained`."""
    config = transformers.PretrainedConfig.get_config_dict(folder)[0]
    model_type = config.pop("model_type").replace("kimi_k2", "deepseek_v3")
    config = transformers.AutoConfig.for_model(model_type, **config)
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, config=config, dtype=torch.float32, **more).eval()


def compute(model: Any) -> Computed:
    """What a transformers model computes."""
    routes_BSE = []

    def keep(router: Any, inputs: Any, outputs: tuple[torch.Tensor, ...]) -> None:
        logits, _, chosen = outputs
        taken = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, chosen, True)
        routes_BSE.append(taken.view(BATCH, SEQUENCE, -1))

    routers = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
    hooks = [router.register_forward_hook(keep) for router in routers]
    with torch.no_grad():
        logits = model(tokens()).logits
    for hook in hooks:
        hook.remove()
    return Computed(logits, routes_BSE)


def command(folder: Path, more: Sequence[str] = ()) -> list[str]:
    """Megatron's arguments for the model of a directory, and for a run of it."""
    described = json.loads((folder / "config.json").read_text())
    family = FAMILIES.get(described["model_type"])
    model = QWEN3.split() if family is None else family.arguments(described)
    run = f"--seq-length {SEQUENCE} --micro-batch-size {BATCH} --train-iters 1 --lr 1e-3"
    run += " --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 32"
    run += " --moe-token-dispatcher-type alltoall --seed 3"
    return [*CPU_ARGS, *model, *run.split(), *more]


def build(folder: Path, more: Sequence[str] = ()) -> tuple[list[Any], Any]:
    """In a rank: Megatron's model of the arguments that the family makes of config.json."""
    from megatron_r3.train import launch

    sys.argv = ["hf.py", *command(folder, more)]
    args = launch.initialize()
    return launch.build_models(args), args


def compute_in_megatron(models: list[Any]) -> Computed:
    """In a rank: what a model computes. With tensor parallelism, this rank's part of it."""
    from megatron.core.transformer.moe.router import TopKRouter

    routes_BSE = []

    def keep(router: Any, inputs: Any, outputs: tuple[torch.Tensor, ...]) -> None:
        # the router has the tokens position by position; under sequence parallelism, some of them
        routes_BSE.append(outputs[1].unflatten(0, (-1, BATCH)).transpose(0, 1).clone())

    (model,) = models
    for module in model.eval().modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(keep)
    with torch.no_grad():
        positions = torch.arange(SEQUENCE).expand(BATCH, -1)
        logits = model(tokens(), positions, None)
    return Computed(logits, routes_BSE)


def move(rank: int, folder: Path, out: Path, more: tuple[str, ...] = ()) -> Computed:
    """In a rank: read a directory, compute, and write the model again."""
    from megatron_r3.weights.write_policy import read_policy, write_policy

    models, args = build(folder, more)
    read_policy(models, folder, vocab_size=args.vocab_size)
    computed = compute_in_megatron(models)
    write_policy(models, out, dtype=torch.float32, vocab_size=args.vocab_size)
    write_policy(models, out.with_name("bfloat16"), vocab_size=args.vocab_size)
    write_policy(models, out.with_name("like"), like=folder, vocab_size=args.vocab_size)
    return computed


def refusals(rank: int, folder: Path, changed: list[Path]) -> list[str]:
    """In a rank: what the model of `folder` says of other directories; it stays as it was."""
    from megatron_r3.weights.write_policy import read_policy

    models, args = build(folder)
    before = [parameter.clone() for parameter in models[0].parameters()]
    said = []
    for other in changed:
        try:
            read_policy(models, other, vocab_size=args.vocab_size)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    after = models[0].parameters()
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    return said
