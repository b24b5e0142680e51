"""The demo's model and trainings, as Megatron arguments: the shape of a tiny Qwen3-MoE."""

from __future__ import annotations

from demo.task import SEQ_LENGTH, VOCAB_SIZE
from megatron_r3.cpu import CPU_ARGS

MODEL = f"""
--num-layers 4 --hidden-size 128 --num-attention-heads 4
--group-query-attention --num-query-groups 2 --kv-channels 32 --qk-layernorm
--ffn-hidden-size 256 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
--position-embedding-type rope --rotary-base 10000 --untie-embeddings-and-output-weights
--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 64
--moe-token-dispatcher-type alltoall --attention-dropout 0 --hidden-dropout 0
--seq-length {SEQ_LENGTH} --max-position-embeddings 64
--tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --make-vocab-size-divisible-by 8
--clip-grad 1.0 --weight-decay 0 --lr-decay-style constant --eval-iters 0 --eval-interval 1000
--num-workers 0 --seed 1234 --log-interval 1 --ckpt-format torch_dist
""".split()

PRETRAIN = """
--micro-batch-size 32 --global-batch-size 64 --train-iters 120 --lr 1e-3 --lr-warmup-iters 20
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --save-interval 1000
""".split()

# RL recipes turn load balancing off: it would move the trainer's routers away from the sampler's.
GRPO = """
--bf16 --micro-batch-size 32 --lr 3e-5
--calculate-per-token-loss --moe-router-load-balancing-type none
--finetune --no-load-optim --no-load-rng --expert-model-parallel-size 2
--moe-router-replay-verify-dispatch --moe-router-replay-log-mismatch-interval 1
--tensorboard-log-interval 1
""".split()


def arguments(*groups: list[str]) -> list[str]:
    """Megatron's arguments for a machine without a GPU: CPU_ARGS, MODEL, and those of `groups`."""
    return [*CPU_ARGS, *MODEL, *(argument for group in groups for argument in group)]
