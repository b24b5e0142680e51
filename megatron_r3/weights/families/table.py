"""The table of the model families: the fields of config.json, and the tensors.

A new family that resembles one of these is a new entry of FAMILIES, and reuses most of the rows.
`table_family.py` reads the table. The kinds of rows are in `field_rows.py`, `odd_rows.py` and, for
tensors, `tensors.py`.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_r3.weights.families.field_rows import (
    Fields,
    Row,
    derived,
    fixed,
    ignored,
    nothing,
    number,
    switch,
)
from megatron_r3.weights.families.odd_rows import (
    EVERY_LAYER,
    GROUPS,
    LATENT_ROPE,
    LATER_LAYERS,
    NAMED_LAYERS,
    QUICK_GELU,
    SHARED_EXPERTS,
    SOME_LAYERS,
    WINDOW,
    WINDOW_LAYERS,
    plain_heads,
)
from megatron_r3.weights.families.table_family import TableFamily
from megatron_r3.weights.families.tensors import table

# -- fields of config.json


def _head_size(above: Fields) -> float:
    return above["hidden_size"] // (above["num_attention_heads"] or 1)


# A family's own row replaces the row with the same name here.
COMMON: tuple[Row, ...] = (
    fixed("hidden_act", "silu"),
    fixed("attention_bias", False),
    fixed("tie_word_embeddings", False),
    fixed("rope_type", "default"),
    fixed("partial_rotary_factor", None, 1.0),
    fixed("layer_types", None, ["full_attention"]),
    number("num_hidden_layers", "num-layers"),
    number("hidden_size", "hidden-size"),
    number("num_attention_heads", "num-attention-heads"),
    number("num_experts_per_tok", "moe-router-topk"),
    number("rms_norm_eps", "norm-epsilon", "layernorm_epsilon"),
    number("rope_theta", "rotary-base"),
    number("vocab_size", "vocab-size"),
    number("max_position_embeddings", "max-position-embeddings", "max_positions"),
)
QUERY_GROUPS = number("num_key_value_heads", "num-query-groups")
HEADS = (QUERY_GROUPS, number("head_dim", "kv-channels", default=_head_size))
# for families whose config.json has no field for the size of a head
PLAIN_HEADS = (QUERY_GROUPS, derived("head_dim", _head_size, write=nothing, needs=plain_heads))
DENSE_SIZE = number("intermediate_size", "ffn-hidden-size")
EXPERT_SIZE = number("moe_intermediate_size", "moe-ffn-hidden-size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERTS, LOCAL_EXPERTS, ROUTED_EXPERTS = (
    number(name, "num-experts", "num_moe_experts", also=tuple(o for o in _EXPERTS if o != name))
    for name in _EXPERTS
)
QWEN: tuple[Row, ...] = (
    EXPERTS,
    SOME_LAYERS,
    EXPERT_SIZE,
    DENSE_SIZE,
    # Without --moe-router-pre-softmax Megatron takes a softmax over the chosen experts. With
    # norm_topk_prob transformers takes a softmax over all experts, and divides the chosen experts'
    # values by their sum, which gives the same.
    switch("norm_topk_prob", "moe-router-pre-softmax", False, reverse=True),
    fixed("use_sliding_window", False),
    ignored("sliding_window"),  # does nothing without use_sliding_window
    ignored("max_window_layers"),
)
# Every layer has experts. So no dense MLP has the size of Megatron's --ffn-hidden-size.
ALL_SPARSE: tuple[Row, ...] = (
    LOCAL_EXPERTS,
    EVERY_LAYER,
    number("intermediate_size", "moe-ffn-hidden-size"),
)
# DeepSeek-V3 and models like it: sigmoid scores, a correction bias, groups, and a scale
SIGMOID: tuple[Row, ...] = (
    ROUTED_EXPERTS,
    LATER_LAYERS,
    EXPERT_SIZE,
    DENSE_SIZE,
    number("routed_scaling_factor", "moe-router-topk-scaling-factor", default=1.0),
    SHARED_EXPERTS,
    GROUPS,
    # Megatron divides the expert weights of a token by their sum, unless top-k is 1.
    derived("norm_topk_prob", lambda above: above["num_experts_per_tok"] > 1, default=True),
    fixed("scoring_func", None, "sigmoid"),
    fixed("topk_method", None, "noaux_tc"),
    ignored("num_nextn_predict_layers", written=0),  # see TableFamily.is_left_out
    ignored("num_mtp_layers"),
    *map(ignored, ("ep_size", "pretraining_tp", "seq_aux", "aux_loss_alpha")),
)
# transformers does not write these two fields, because it knows no other routing for DeepSeek-V3.
# Without them vLLM takes softmax scores and no correction bias.
SIGMOID_SAID = (fixed("scoring_func", "sigmoid", None), fixed("topk_method", "noaux_tc", None))
# latent attention (MLA)
LATENT: tuple[Row, ...] = (
    derived("num_key_value_heads", lambda above: above["num_attention_heads"]),
    number("q_lora_rank", "q-lora-rank", may_be_null=True),
    number("kv_lora_rank", "kv-lora-rank"),
    number("qk_nope_head_dim", "qk-head-dim"),
    number("qk_rope_head_dim", "qk-pos-emb-head-dim"),
    number("v_head_dim", "v-head-dim"),
    *LATENT_ROPE,
    fixed("rope_interleave", True),
    # these two follow from qk_nope_head_dim and qk_rope_head_dim
    ignored("head_dim"),
    ignored("qk_head_dim"),
)
YARN: tuple[Row, ...] = (
    fixed("rope_type", "yarn"),
    number("factor", "rotary-scaling-factor", "yarn_rotary_scaling_factor"),
    number("original_max_position_embeddings", "yarn-original-max-position-embeddings"),
    number("beta_fast", "yarn-beta-fast"),
    number("beta_slow", "yarn-beta-slow"),
    fixed("truncate", False),
    *(fixed(name, None) for name in ("attention_factor", "mscale", "mscale_all_dim")),
)

# -- Megatron's arguments of every model of a family; `{name}` is what the row `name` has read

# Megatron's own defaults are those of GPT-2, and have dropout
BASE_FLAGS = """
--normalization RMSNorm --untie-embeddings-and-output-weights --attention-dropout 0
--hidden-dropout 0 """
PLAIN_FLAGS = f"{BASE_FLAGS} --swiglu --disable-bias-linear --position-embedding-type rope "
GROUPED_FLAGS = f"{PLAIN_FLAGS} --group-query-attention "
# transformers computes these routers in float32. With another bias update rate than 0 Megatron
# changes the bias in every step, by the number of tokens of each expert.
SIGMOID_FLAGS = """
--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32
--moe-router-bias-update-rate 0 """
LATENT_CONFIG = {"multi_latent_attention": True, "qk_layernorm": True}
SIGMOID_CONFIG = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}

# -- tensors

# attention with grouped queries; norms and biases only if the model has them
ATTENTION = table("""
input_layernorm.weight              input_layernorm.weight            same
pre_mlp_layernorm.weight            post_attention_layernorm.weight   same
self_attention.linear_qkv.weight    self_attn.{q,k,v}_proj.weight     qkv
self_attention.linear_proj.weight   self_attn.o_proj.weight           same
self_attention.linear_qkv.bias      self_attn.{q,k,v}_proj.bias       qkv     if=add_qkv_bias
self_attention.q_layernorm.weight   self_attn.q_norm.weight           same    if=qk_layernorm
self_attention.k_layernorm.weight   self_attn.k_norm.weight           same    if=qk_layernorm
""")
# Megatron and transformers both keep the rotary part of a head in pairs x0 x1, x2 x3, and rotate
# such pairs: Megatron by `mla_rotary_interleaved` in multi_latent_attention.py, transformers by
# `rope_interleave`. So the rows of the weights have the same order.
LATENT_ATTENTION = table("""
input_layernorm.weight                      input_layernorm.weight                same
pre_mlp_layernorm.weight                    post_attention_layernorm.weight       same
self_attention.linear_kv_down_proj.weight   self_attn.kv_a_proj_with_mqa.weight   same
self_attention.kv_layernorm.weight          self_attn.kv_a_layernorm.weight       same
self_attention.linear_kv_up_proj.weight     self_attn.kv_b_proj.weight            same
self_attention.linear_proj.weight           self_attn.o_proj.weight               same
self_attention.linear_q_proj.weight         self_attn.q_proj.weight        same unless=q_lora_rank
self_attention.linear_q_down_proj.weight    self_attn.q_a_proj.weight      same if=q_lora_rank
self_attention.q_layernorm.weight           self_attn.q_a_layernorm.weight same if=q_lora_rank
self_attention.linear_q_up_proj.weight      self_attn.q_b_proj.weight      same if=q_lora_rank
""")
DENSE = table("""
mlp.linear_fc1.weight                       mlp.{gate,up}_proj.weight             halves
mlp.linear_fc2.weight                       mlp.down_proj.weight                  same
""")
ROUTED = table("""
mlp.router.weight                           mlp.gate.weight                       same
mlp.experts.experts.linear_fc1.weight       mlp.experts.*.{gate,up}_proj.weight   halves
mlp.experts.experts.linear_fc2.weight       mlp.experts.*.down_proj.weight        same
""")
SHARED = ROUTED + table("""
mlp.shared_experts.linear_fc1.weight  mlp.shared_experts.{gate,up}_proj.weight    halves
mlp.shared_experts.linear_fc2.weight  mlp.shared_experts.down_proj.weight         same
""")
# The router's bias is added to the scores that choose the experts, not to their weights.
BIASED = SHARED + table("""
mlp.router.expert_bias                mlp.gate.e_score_correction_bias            same
""")
GATED_SHARED = ROUTED + table("""
mlp.shared_experts.linear_fc1.weight  mlp.shared_expert.{gate,up}_proj.weight     halves
mlp.shared_experts.linear_fc2.weight  mlp.shared_expert.down_proj.weight          same
mlp.shared_experts.gate_weight        mlp.shared_expert_gate.weight               same
""")
MIXTRAL = table("""
mlp.router.weight                      block_sparse_moe.gate.weight               same
mlp.experts.experts.linear_fc1.weight  block_sparse_moe.experts.*.{w1,w3}.weight  halves
mlp.experts.experts.linear_fc2.weight  block_sparse_moe.experts.*.w2.weight       same
""")
# Biases everywhere, sinks in the attention. In transformers one tensor has a weight or bias of all
# experts of a layer; in gate_up_proj gate and up alternate.
GPT_OSS = table("""
self_attention.core_attention.softmax_offset  self_attn.sinks                same
self_attention.linear_proj.bias               self_attn.o_proj.bias          same
mlp.router.weight                             mlp.router.weight              same
mlp.router.bias                               mlp.router.bias                same
mlp.experts.experts.linear_fc1.weight         mlp.experts.gate_up_proj       stacked-in-turns
mlp.experts.experts.linear_fc1.bias           mlp.experts.gate_up_proj_bias  stacked-in-turns
mlp.experts.experts.linear_fc2.weight         mlp.experts.down_proj          stacked
mlp.experts.experts.linear_fc2.bias           mlp.experts.down_proj_bias     stacked
""")

# -- the families

# The two norms inside of MLA have the epsilon 1e-6 in transformers, whatever `rms_norm_eps` is;
# in Megatron all norms have the same epsilon.
DEEPSEEK_V3 = TableFamily(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    rows=(*COMMON, *LATENT, *SIGMOID, *SIGMOID_SAID),
    # Megatron's attention asks for --kv-channels; MLA then uses its own sizes
    flags=f"{PLAIN_FLAGS} {SIGMOID_FLAGS} --multi-latent-attention --qk-layernorm"
    " --kv-channels {v_head_dim}",
    config={**SIGMOID_CONFIG, **LATENT_CONFIG},
    layer=LATENT_ATTENTION,
    dense=DENSE,
    sparse=BIASED,
    predicts=True,
)
FAMILIES = (
    TableFamily(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        rows=(*COMMON, *HEADS, *QWEN),
        flags=GROUPED_FLAGS + "--qk-layernorm",
        config={"qk_layernorm": True},
        layer=ATTENTION,
        dense=DENSE,
        sparse=ROUTED,
    ),
    TableFamily(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        rows=(
            *(*COMMON, *PLAIN_HEADS, *QWEN),
            number("shared_expert_intermediate_size", "moe-shared-expert-intermediate-size"),
            switch("qkv_bias", "add-qkv-bias", True),
        ),
        flags=GROUPED_FLAGS + "--moe-shared-expert-gate",
        config={"moe_shared_expert_gate": True},
        layer=ATTENTION,
        dense=DENSE,
        sparse=GATED_SHARED,
    ),
    TableFamily(
        "mixtral",
        "MixtralForCausalLM",
        # router_jitter_noise changes only training
        rows=(
            *(*COMMON, *HEADS, *ALL_SPARSE),
            *(fixed("sliding_window", None), ignored("router_jitter_noise")),
        ),
        flags=GROUPED_FLAGS + "--ffn-hidden-size {intermediate_size}",
        layer=ATTENTION,
        sparse=MIXTRAL,
    ),
    DEEPSEEK_V3,
    replace(DEEPSEEK_V3, model_type="kimi_k2", by_name=True),
    # DeepSeek-V2-Lite. DeepSeek-V2 scores a group by its best expert, Megatron by its best two.
    replace(
        DEEPSEEK_V3,
        model_type="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        rows=(
            *(*COMMON, *LATENT, *(row for row in SIGMOID if row is not GROUPS)),
            *(fixed(name, 1, None) for name in ("n_group", "topk_group")),
            *(fixed(name, False) for name in ("norm_topk_prob", "mlp_bias")),
            *(fixed("scoring_func", "softmax"), fixed("topk_method", "greedy")),
        ),
        flags=DEEPSEEK_V3.flags.replace(
            SIGMOID_FLAGS, "--moe-router-pre-softmax --moe-router-dtype fp32"
        ),
        config={**LATENT_CONFIG, "moe_router_pre_softmax": True},
        sparse=SHARED,
        predicts=False,
    ),
    # GLM-4.7-Flash: DeepSeek-V3 with fields of its own for the dense layers
    replace(
        DEEPSEEK_V3,
        model_type="glm4_moe_lite",
        architecture="Glm4MoeLiteForCausalLM",
        rows=(*COMMON, *LATENT, *SIGMOID, NAMED_LAYERS),
        by_name=True,
    ),
    # some of the GLM-4.5 models have norms of queries and keys, and some have none
    TableFamily(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        rows=(
            *(*COMMON, *HEADS, *SIGMOID),
            number("partial_rotary_factor", "rotary-percent", default=0.5),
            switch("attention_bias", "add-qkv-bias", False),
            switch("use_qk_norm", "qk-layernorm", False),
        ),
        flags=GROUPED_FLAGS + SIGMOID_FLAGS,
        config=SIGMOID_CONFIG,
        layer=ATTENTION,
        dense=DENSE,
        sparse=BIASED,
        predicts=True,
    ),
    TableFamily(
        "gpt_oss",
        "GptOssForCausalLM",
        rows=(
            *(*COMMON, *HEADS, *ALL_SPARSE, *YARN, *(WINDOW, WINDOW_LAYERS, QUICK_GELU)),
            number("swiglu_limit", "activation-func-clamp-value", default=7.0),
            fixed("attention_bias", True),
            # OpenAI's own names of num_experts_per_tok and original_max_position_embeddings
            *map(ignored, ("experts_per_token", "initial_context_length")),
        ),
        flags=f"""{BASE_FLAGS} --quick-geglu --glu-linear-offset 1.0 --softmax-type learnable
            --position-embedding-type yarn --no-yarn-correction-range-round-to-int
            --no-bias-dropout-fusion --group-query-attention --ffn-hidden-size"""
        " {intermediate_size}",
        config={
            **{"glu_linear_offset": 1.0, "softmax_type": "learnable"},
            **{"add_bias_linear": True, "add_qkv_bias": True},
            **{"yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.0},
            "yarn_correction_range_round_to_int": False,
        },
        settings={"position_embedding_type": "yarn"},
        layer=ATTENTION,
        sparse=GPT_OSS,
    ),
)
# model types that one may expect in FAMILIES, and why they are refused
REFUSED = {
    "olmoe": (
        "the model normalizes the queries and keys of all heads together, and Megatron "
        "(SelfAttention in megatron/core/transformer/attention.py) those of each head"
    ),
}
