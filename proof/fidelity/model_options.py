"""Find the options of a Megatron tree that may change what a model computes, and are in no list.

    python -m proof.fidelity.model_options TREE

The program reads the source of a tree, and runs nothing of it. The options are the fields of the
configs of a GPTModel, the other arguments of GPTModel, and each X of `args.X` in the functions that
build a model or a config. Exit status 0 says that each option is described by a family
(`megatron_r3.weights`), changes nothing (`megatron_r3.weights.known`), or is in CHANGE_THE_MODEL
below.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_r3.weights.families import FAMILIES
from megatron_r3.weights.families.table_family import PLAIN, SHOWN
from megatron_r3.weights.known import BALANCING, changes_nothing

# Options that change a model and that no family describes: a config must have the default of each.
CHANGE_THE_MODEL = frozenset(
    # fields of configs
    """
    attention_output_gate dsa_indexer_head_dim dsa_indexer_k_norm_epsilon
    dsa_indexer_k_norm_fp32 dsa_indexer_n_heads dsa_indexer_rope_interleaved
    dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_skip_topk_offset
    dsa_indexer_topk dsa_indexer_topk_freq enable_mhc_connections experimental_attention_variant
    gdp_num_householder heterogeneous_block_specs heterogeneous_layers_config_encoded_json
    heterogeneous_layers_config_path is_hybrid_model layernorm_zero_centered_gamma
    linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads
    linear_num_value_heads linear_value_head_dim mamba_head_dim mamba_num_groups mamba_num_heads
    mamba_state_dim mhc_num_residual_streams mhc_sinkhorn_iterations moe_apply_probs_on_input
    moe_expert_capacity_factor moe_expert_rank_capacity_factor moe_latent_size
    moe_mlp_glu_interleave_size moe_pad_expert_input_to_capacity moe_router_force_biased
    moe_router_force_load_balancing moe_router_topk_limited_devices
    moe_shared_expert_glu_interleave_size moe_token_drop_policy moe_token_dropping mrope_section
    mtp_hybrid_override_pattern mtp_num_layers mtp_use_repeated_layer mup_attn_scale_power
    mup_base_head_dim mup_base_hidden_size mup_embedding_mult mup_output_mult mup_width_mult
    no_rope_freq per_block_parameters qk_l2_norm rotary_interleaved
    softmax_scale use_mup
    """
    # arguments of the builder and of GPTModel: `ModelSettings` has them under other names
    """
    apply_layernorm_1p group_query_attention hybrid_layer_pattern norm_epsilon num_experts
    position_embedding_type quick_geglu rotary_seq_len_interpolation_factor spec squared_relu swiglu
    untie_embeddings_and_output_weights use_legacy_models use_rope_scaling yaml_cfg
    """.split()
)
_CONFIGS = (
    "megatron/core/transformer/transformer_config.py",
    "megatron/core/transformer/heterogeneous/heterogeneous_config.py",
)
_LAYOUT = "megatron/core/model_parallel_config.py"  # no field of this config changes a model
_BUILDERS = {
    "megatron/training/arguments.py": {"core_transformer_config_from_args"},
    "megatron/training/argument_utils.py": {
        *("core_transformer_config_from_args", "_apply_yarn_config_from_args"),
        *("gpt_config_from_args", "hybrid_config_from_args"),
    },
    "gpt_builders.py": {"gpt_builder"},
}
# arguments of GPTModel that are no options of a user
_OF_THE_CALL = """
self config transformer_layer_spec vocab_size max_sequence_length pre_process post_process
parallel_output share_embeddings_and_output_weights scatter_embedding_sequence_parallel
mtp_block_spec pg_collection vp_stage model_comm_pgs rope_scaling rope_scaling_factor
seq_len_interpolation_factor
""".split()


def unread(tree: Path) -> list[str]:
    """The options of a tree that are in none of the lists, sorted."""
    of_layout = {*_fields(tree / _LAYOUT)}
    return sorted({name for name in options(tree) if not _is_known(name, of_layout)})


def options(tree: Path) -> Iterator[str]:
    """The names of all options of a tree that may change a model."""
    for path in _CONFIGS:
        yield from _fields(tree / path)
    for path, functions in _BUILDERS.items():
        for node in ast.walk(_parsed(tree / path)):
            if isinstance(node, ast.FunctionDef) and node.name in functions:
                yield from _arguments(node)
    for node in ast.walk(_parsed(tree / "megatron/core/models/gpt/gpt_model.py")):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            yield from (given.arg for given in node.args.args if given.arg not in _OF_THE_CALL)


def _fields(file: Path) -> Iterator[str]:
    """The fields of each `*TransformerConfig` and `*ModelParallelConfig` in a file."""
    for node in _parsed(file).body:
        if isinstance(node, ast.ClassDef) and node.name.endswith(
            ("TransformerConfig", "ModelParallelConfig")
        ):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield field.target.id


def _parsed(file: Path) -> ast.Module:
    # PyPI's wheel of 0.16 has no megatron/training, and no wheel has gpt_builders.py
    return ast.parse(file.read_text() if file.exists() else "")


def _arguments(function: ast.FunctionDef) -> Iterator[str]:
    """Every X of `args.X`, `getattr(args, "X")` and `hasattr(args, "X")`."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "args":
            yield node.attr
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("getattr", "hasattr")
            and ast.unparse(node.args[0]) == "args"
            and isinstance(node.args[1], ast.Constant)
        ):
            yield str(node.args[1].value)


def _is_known(name: str, of_layout: set[str]) -> bool:
    described = {BALANCING, *PLAIN, *SHOWN}
    for family in FAMILIES.values():
        described |= {*family.config, *family.attributes()}
    return changes_nothing(name, of_layout) or name in CHANGE_THE_MODEL or name in described


if __name__ == "__main__":
    names = unread(Path(sys.argv[1]))
    sys.exit(f"options in no list: {', '.join(names)}" if names else 0)
