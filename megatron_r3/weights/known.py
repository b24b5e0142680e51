"""Lists the options of Megatron and the fields of config.json that do not change a model.

An option that is not listed here counts as an option that changes the model, so that an option of a
newer Megatron is not ignored. A checkpoint with another value of such an option is not loaded, and
a model with such an option is moved only if its family describes the option. Whoever adds a release
line reads what its new options do, and lists those that change nothing in CHANGE_NOTHING.
proof/fidelity/model_options.py finds the options of a tree that are in no list yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megatron_r3.replay.words import quoted

# Fields of TransformerConfig and MLATransformerConfig, and arguments that build a model, of
# core_v0.16.1 to main of 2026-08-22. Whatever the values of these fields are, the same weights
# compute the same, up to rounding. The fields of ModelParallelConfig (layout, communication) change
# nothing either, and are not listed.
CHANGE_NOTHING = frozenset(
    # the layout, communication, dispatchers
    """
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split cp_comm_type
    decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers gtp_remat_opt_in_modules
    hetereogenous_dist_checkpoint high_priority_a2a_comm_stream mlp_chunks_for_prefill
    mlp_chunks_for_training moe_deepep_num_sms moe_enable_deepep moe_flex_dispatcher_backend
    moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
    moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs
    moe_ncclep_static_shape moe_ncclep_zero_copy moe_shared_expert_overlap moe_token_dispatcher_type
    nccl_all_reduce_for_prefill num_layers_in_first_pipeline_stage
    num_layers_in_last_pipeline_stage pipeline_model_parallel_layout symmetric_ar_type
    """
    # memory: recompute, offloading, CUDA graphs
    """
    activation_offload_fraction clone_scatter_output_in_embedding
    cuda_graph_impl cuda_graph_modules cuda_graph_retain_backward_graph cuda_graph_scope
    cuda_graph_use_single_mempool cuda_graph_warmup_steps delay_offload_until_cuda_graph
    delta_offload_bytes_across_pp_ranks disable_parameter_transpose_cache
    distribute_saved_activations enable_cuda_graph external_cuda_graph
    fine_grained_activation_offloading fine_grained_offloading_max_inflight_offloads
    gdp_num_chunk_states_to_recompute mhc_recompute_layer_num min_offloaded_tensor_size
    moe_layer_recompute moe_paged_stash moe_paged_stash_buffer_size_factor_cpu
    moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size offload_modules
    recompute_granularity recompute_method recompute_modules recompute_num_layers
    """
    # kernels and fusions
    """
    apply_rope_fusion attention_backend batch_invariant_backend batch_invariant_mode
    bias_activation_fusion bias_dropout_fusion bias_gelu_fusion bias_swiglu_fusion
    cache_mla_latents dsa_kernel_backend flash_attention_version flash_decode
    fused_residual_rmsnorm fused_single_qkv_rope gdp_cutedsl_kernel masked_softmax_fusion
    memory_efficient_layer_norm mla_down_proj_fusion moe_grouped_gemm moe_permute_fusion
    moe_permute_fusion_into_hybridep moe_router_fusion moe_router_padding_for_fp8
    moe_router_padding_for_quantization moe_single_grouped_bias moe_single_grouped_weight
    moe_use_grouped_tensor moe_use_legacy_grouped_gemm no_persist_layer_norm persist_layer_norm
    transformer_impl use_fused_weighted_squared_relu use_grouped_gemm_for_dense_mlp
    use_grouped_gemm_for_shared_expert use_mamba_mem_eff_path use_te_activation_func
    use_transformer_engine_op_fuser
    """
    # the precision in which the run computes
    """
    activation_func_fp8_input_store apply_query_key_layer_scaling attention_softmax_in_fp32
    disable_bf16_reduced_precision_matmul first_last_layers_bf16 fp16_lm_cross_entropy fp4
    fp4_param fp4_param_gather fp4_quantizer_factory fp4_recipe fp8 fp8_amax_compute_algo
    fp8_amax_history_len fp8_dot_product_attention fp8_interval fp8_margin
    fp8_multi_head_attention fp8_output_proj fp8_param fp8_param_gather fp8_quantizer_factory
    fp8_recipe fp8_wgrad fp32_residual_connection kitchen_attention_backend kitchen_config_file
    kitchen_recipe_number logit_dtype mamba_training_ssm_states_dtype moe_combine_bwd_dtype
    moe_dispatch_fwd_dtype moe_router_dtype num_layers_at_end_in_bf16 num_layers_at_start_in_bf16
    quant_recipe te_precision_config_file tp_only_amax_red use_kitchen
    use_kitchen_attention
    """
    # only training, and the initial weights
    """
    attention_dropout calculate_per_token_loss dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss
    embedding_init_method embedding_init_method_std experimental_attention_variant_loss_scale_func
    hidden_dropout init_method init_method_std init_method_xavier_uniform
    init_model_with_meta_device log_max_attention_logit mhc_init_gating_factor moe_aux_loss_coeff
    moe_input_jitter_eps moe_router_bias_update_rate moe_router_quantile_balancing_ema
    moe_z_loss_coeff mtp_detach_heads mtp_hsm mtp_loss_scaling_factor output_layer_init_method
    qk_clip qk_clip_alpha qk_clip_threshold
    """
    # inference, logs, random numbers, the padding of the vocabulary; max_position_embeddings, which
    # RoPE does not use; apply_residual_connection_post_layernorm, which no release acts on
    """
    apply_residual_connection_post_layernorm config_logger_dir inference_cuda_graph_scope
    inference_disable_triton_nvls_kernels inference_fuse_tp_communication
    inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels
    inference_moe_token_dispatcher_type inference_rng_tracker inference_sampling_seed
    make_vocab_size_divisible_by max_position_embeddings moe_enable_routing_replay
    moe_pad_experts_for_cuda_graph_inference moe_per_layer_logging padded_vocab_size seed test_mode
    use_inference_optimized_layers use_te_rng_tracker
    """.split()
)
_OURS = "moe_router_replay"  # the names of this project's own fields begin with this
# The types of load balancing that only add a loss, or nothing. Any other type changes the routes.
BALANCING = "moe_router_load_balancing_type"
_ONLY_LOSSES = {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"}
# Names of an argument in other releases: checkpoints of 0.15 have the names on the right.
_ALSO = {"layernorm_epsilon": "norm_epsilon", "layernorm_zero_centered_gamma": "apply_layernorm_1p"}
_ALSO |= {other: name for name, other in _ALSO.items()}

# Fields of config.json that change nothing in a model of any family: token ids, dtypes, training,
# what a forward pass returns, which program wrote the file.
CONFIG_CHANGES_NOTHING = frozenset(
    """
    _attn_implementation_autoset _name_or_path architectures attention_dropout auto_map bos_token_id
    chunk_size_feed_forward dtype eos_token_id id2label initializer_range is_encoder_decoder
    label2id output_attentions output_hidden_states output_router_logits pad_token_id problem_type
    return_dict router_aux_loss_coef sep_token_id torch_dtype transformers_version unsloth_fixed
    unsloth_version use_cache
    """.split()
)
# All fields of config.json's rope_parameters that this project reads
ROPE = (
    *("rope_theta", "rope_type", "partial_rotary_factor", "factor", "truncate", "beta_fast"),
    *("beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings"),
    "attention_factor",
)


def changes_nothing(name: str, of_layout: Collection[str] = ()) -> bool:
    """Whether the field or argument `name` is known not to change what a model computes.

    Args:
        of_layout: further names that change nothing, those of ModelParallelConfig.
    """
    return name in CHANGE_NOTHING or name.startswith(_OURS) or name in of_layout


def routes_itself(value: Any) -> list[str]:
    """The types of load balancing in `value`, a type or a list, that do more than add a loss."""
    return sorted({*(value if isinstance(value, list) else [value])} - _ONLY_LOSSES)


def defaults(kind: type) -> dict[str, Any]:
    """The fields that may change a model, with the defaults of Megatron's own class.

    Args:
        kind: TransformerConfig or a class derived from it. The defaults of a framework's derived
            class are not used, because they may be those of another model. Any other class gives
            an empty dict.
    """
    above = {one.__name__: one for one in reversed(kind.__mro__)}
    upstream = [one for one in kind.__mro__ if one.__module__.startswith("megatron.core.")]
    if not upstream:
        return {}
    of_layout = {field.name for field in dataclasses.fields(above["ModelParallelConfig"])}
    return {
        field.name: field.default
        if field.default_factory is dataclasses.MISSING
        else field.default_factory()
        for field in dataclasses.fields(upstream[0])
        if field.init and not changes_nothing(field.name, of_layout)
    }


def differing(saved: Any, args: Any, names: Collection[str]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the checkpoint's value and the given value of each argument that differs.

    Only arguments that change the model are compared.

    Args:
        saved: the checkpoint's own arguments. An option that the checkpoint's release did not have
            was off.
        args: the given arguments.
        names: the arguments that Megatron reads to build a model.
    """
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    off = {**defaults(MLATransformerConfig), **defaults(TransformerConfig)}
    of_layout = {field.name for field in dataclasses.fields(ModelParallelConfig)}
    for name in sorted({*names, "vocab_size"}):
        if changes_nothing(name, of_layout):
            continue
        other = _ALSO.get(name, name)
        then = getattr(saved, name, getattr(saved, other, off.get(name)))
        now = getattr(args, name, None)
        if name == "vocab_size" and None in (then, now):
            continue  # None with a tokenizer; the rows of the embedding are compared later
        if not (hasattr(saved, name) or hasattr(saved, other) or name in off or now):
            continue  # the checkpoint lacks the option, and None or False means off
        if name == BALANCING:
            then, now = routes_itself(then), routes_itself(now)
        if _listed(then) != _listed(now):
            yield name, then, now


def _listed(value: Any) -> Any:
    """`value`, with a tuple as a list: some releases store a tuple, and others store a list."""
    return list(value) if isinstance(value, tuple) else value


def rope_of(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of rope_scaling or rope_parameters in a config.json; empty if it has neither.

    Raises:
        ValueError: one of them is no object, or the two differ. If they differ, transformers 5
            takes rope_scaling and ignores rope_parameters; other readers may do the opposite.
    """
    found = []
    for name in ("rope_scaling", "rope_parameters"):
        if rope := hf_config.get(name):
            if not isinstance(rope, Mapping):
                raise ValueError(f"{name} is {quoted(rope)}; expected an object")
            named = {"rope_type": rope.get("type", "default"), **rope}
            found.append({key: value for key, value in named.items() if key != "type"})
    if len(found) == 2 and found[0] != found[1]:
        raise ValueError(
            f"rope_scaling is {quoted(found[0])}, rope_parameters is {quoted(found[1])}: "
            "transformers takes rope_scaling, other readers may not; remove the wrong one"
        )
    return found[0] if found else {}
