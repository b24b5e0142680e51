"""A training loop of one's own that replays what an engine recorded, on any number of processes.

    PYTHONPATH=TREE:$PWD build/venv/bin/torchrun --nproc-per-node 2 -m megatron_r3.cpu \\
        demo/own_loop.py

TREE is a patched Megatron-LM of 0.16 or later; there are as many expert-parallel ranks as
processes. A copy of the policy plays the engine. Its router weights have a little noise, so that
some tokens take other experts there. `--shift 1` gives each token the experts of the token before
it, so the loss must change. Try that once in a loop of your own.

Shape suffixes (docs/glossary.md): B, K, L, S, T.
"""

from __future__ import annotations

import argparse
import os

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel as Ddp
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_r3 import ModelRoutes, RouteArrays, recording, replaying, router_mismatch
from megatron_r3.cpu import CPU_CONFIG

LAYERS, EXPERTS, TOPK = 4, 8, 2
BATCH, SEQUENCE, VOCABULARY = 4, 16, 64
CONFIG = {
    "num_layers": LAYERS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "kv_channels": 8,
    "num_moe_experts": EXPERTS,
    "moe_router_topk": TOPK,
    "moe_ffn_hidden_size": 16,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "normalization": "RMSNorm",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "moe_router_replay": True,
    **CPU_CONFIG,
}


def policy(config: TransformerConfig) -> GPTModel:
    """A model; each call gives it the same weights."""
    torch.manual_seed(3)
    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    return GPTModel(config, layers, VOCABULARY, SEQUENCE, position_embedding_type="rope")


def sampled_routes(engine: GPTModel, layout, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What an engine sends: the experts `[L, B * S, K]` of all tokens, sequence after sequence."""
    with torch.no_grad(), recording() as routes:
        engine(batch["tokens"], batch["positions"], None)
    # A router has its tokens in another order than the batch: token 1 of sequence 0 comes after
    # token 0 of all sequences. `router_order` puts a field of the batch into the router's order.
    order_T = layout.router_order(batch["rows"])
    ids_LTK = torch.empty(LAYERS, BATCH * SEQUENCE, TOPK, dtype=torch.uint8)
    for layer_number, ids_TK in routes.ids.items():
        ids_LTK[layer_number - 1, order_T] = ids_TK.to(torch.uint8)
    return ids_LTK


def main() -> None:
    """Train three steps; print the loss of each, and how many live routes differ."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--shift", type=int, default=0, help="give each token the routes of the token SHIFT before"
    )
    shift = parser.parse_args().shift
    torch.distributed.init_process_group("gloo")
    processes = int(os.environ["WORLD_SIZE"])
    parallel_state.initialize_model_parallel(expert_model_parallel_size=processes)
    model_parallel_cuda_manual_seed(1)

    config = TransformerConfig(**CONFIG, expert_model_parallel_size=processes)
    gpt = policy(config)
    engine = policy(config)
    for name, weight in engine.named_parameters():
        if "router" in name:
            weight.data += 1e-3 * torch.randn_like(weight)
    model_routes = ModelRoutes(gpt)  # once for each model chunk, when the process groups exist
    model = Ddp(config, DistributedDataParallelConfig(), gpt)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, clip_grad=1.0), [model])

    tokens = torch.randint(
        VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(5)
    )
    batch = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "positions": torch.arange(SEQUENCE).expand(BATCH, -1),
        # the index of each token's route in the array below; -1 would be padding
        "rows": torch.arange(BATCH * SEQUENCE).reshape(BATCH, SEQUENCE),
    }
    ids_LTK = sampled_routes(engine, model_routes.layout, batch).roll(shift, dims=1)
    source = RouteArrays(ids_LTK, EXPERTS, moe_layers=tuple(range(LAYERS)))
    for step in range(3):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        counted = torch.ones_like(batch["rows"], dtype=torch.bool)
        routes = model_routes.microbatch(source, batch["rows"], counted_BS=counted)
        with replaying(routes):
            loss = model(batch["tokens"], batch["positions"], None, labels=batch["labels"]).mean()
        loss.backward()
        finalize_model_grads([model])
        optimizer.step()
        differ = sum(differs for differs, _ in router_mismatch([routes]).values())
        if torch.distributed.get_rank() == 0:
            pairs = LAYERS * BATCH * SEQUENCE
            print(f"step {step}: loss {loss.item():.6f}, {differ} of {pairs} pairs differ live")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
