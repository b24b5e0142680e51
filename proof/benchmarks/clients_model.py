"""The model and the batch on which `make bench-clients` runs every way to replay.

Megatron is imported only inside the functions that a rank runs.

Shape suffixes (docs/glossary.md): L, T, K.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megatron_r3.cpu import CPU_CONFIG

LAYERS, EXPERTS, TOPK = 4, 16, 4
VOCABULARY, LONGEST = 256, 48
SAMPLES, TOGETHER = 8, 4  # samples of a rank, and how many are packed into a micro-batch
MICROBATCHES = SAMPLES // TOGETHER
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def start(rank: int, expert_parallel: int, meeting: str) -> None:
    """Process groups and random streams.

    Args:
        rank: of as many ranks as share the experts.
        meeting: where these ranks find each other, as torch's `init_method`.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=expert_parallel
    )
    parallel_state.initialize_model_parallel(
        expert_tensor_parallel_size=1, expert_model_parallel_size=expert_parallel
    )
    model_parallel_cuda_manual_seed(1)


def make_config(expert_parallel: int, recompute: bool, **options: Any) -> Any:
    """The TransformerConfig of a Qwen3-MoE of 4 layers, 16 experts, top-4."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=32,
        qk_layernorm=True,
        ffn_hidden_size=256,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_ffn_hidden_size=64,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=1,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        variable_seq_lengths=True,
        pipeline_dtype=torch.float32,
        moe_permute_fusion=False,
        **CPU_CONFIG,
        **(FULL if recompute else {}),
        **options,
    )


def make_model(config: Any) -> Any:
    """A GPTModel with Megatron's local layers; the same weights for the same shape."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    torch.manual_seed(3)
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=VOCABULARY,
        max_sequence_length=LONGEST,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


@dataclass
class Batch:
    """What a rank trains on in a step: samples of several lengths, packed four by four.

    Args:
        rank: another rank has other tokens.

    Attributes:
        tokens: of each sample, int64.
        responses: how many tokens of each sample are its response.
        routes: of each sample int16 `[tokens - 1, L, K]`, as an engine returns them: the last token
            was never forwarded. Empty until somebody has recorded them.
    """

    rank: int
    tokens: list[torch.Tensor] = field(init=False)
    responses: list[int] = field(init=False)
    routes: list[np.ndarray] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Draw the samples."""
        # The same lengths in every micro-batch and on every rank: in each layer ranks would wait
        # for the one with the most tokens.
        drawn = np.random.default_rng(0).integers(LONGEST // 2, LONGEST + 1, TOGETHER)
        lengths = np.tile(drawn, MICROBATCHES).tolist()
        rng = np.random.default_rng(1 + self.rank)
        self.tokens = [torch.from_numpy(rng.integers(1, VOCABULARY, n)) for n in lengths]
        self.responses = [len(ids) // 2 for ids in self.tokens]

    def microbatches(self) -> list[range]:
        """The numbers of the samples of each micro-batch."""
        return [range(first, first + TOGETHER) for first in range(0, SAMPLES, TOGETHER)]

    def num_tokens(self) -> int:
        """The tokens of all samples."""
        return sum(map(len, self.tokens))

    def turned(self, chosen: list[np.ndarray]) -> list[np.ndarray]:
        """The routes of a benchmark, from those that the live router chose.

        Every expert is replaced by the one that stands half of the experts further. So a rank and
        an expert have the load that another one has under live routing, and no replay that is live
        without a word can pass for right. Example with 16 experts: [0, 3, 9, 15] is [8, 11, 1, 7].
        """
        return [(ids_TLK + EXPERTS // 2) % EXPERTS for ids_TLK in chosen]

    def wanted(self, samples: range) -> np.ndarray:
        """The routes of a packed micro-batch `[L, T, K]`; -1 for a token without a route."""
        missing = np.full((1, LAYERS, TOPK), -1, np.int16)
        parts = [part for index in samples for part in (self.routes[index], missing)]
        return np.concatenate(parts).transpose(1, 0, 2)
