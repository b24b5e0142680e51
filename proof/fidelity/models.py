"""The tiny models of the fidelity table, as Megatron arguments."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_r3.cpu import CPU_ARGS
from proof.fidelity.update import Update

SEQ_LENGTH = 32
VOCAB_SIZE = 63  # 0.17's NullTokenizer adds one; padding to a multiple of 16 gives 64 in any case
EXPERTS, TOPK = 8, 2
ONE_STEP, TWO_STEPS = Update(), Update(mini_steps=2, old="trainer")

COMMON = f"""
--hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2
--ffn-hidden-size 64 --normalization RMSNorm --swiglu --disable-bias-linear
--position-embedding-type rope --untie-embeddings-and-output-weights
--num-experts {EXPERTS} --moe-router-topk {TOPK} --moe-ffn-hidden-size 16
--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none
--attention-dropout 0 --hidden-dropout 0 --calculate-per-token-loss
--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH}
--tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --make-vocab-size-divisible-by 16
--num-workers 0 --seed 1234 --eval-interval 1000 --init-method-std 0.1 --ckpt-format torch_dist
""".split()


@dataclass(frozen=True)
class Model:
    """A model, its rollouts, and the update on them.

    Attributes:
        arguments: Megatron's options beside those of COMMON.
        moe_layers: the decoder layers that are MoE layers, counted from 0.
        holes: the share of missing rows.
        hot: how many experts, the first ones, are in more routes than the others.
        multiple: the number of input tokens of every rollout is a multiple of this.
        tolerance: the largest relative error of loss and gradients that a layout may have.
        update: how a training updates the weights on the rollouts.
        adapters: the linear layers that get LoRA adapters; all else is frozen. Empty: none.
    """

    arguments: str
    moe_layers: tuple[int, ...]
    holes: float = 0.0
    hot: int = 0
    multiple: int = 1
    tolerance: float = 2e-5
    update: Update = ONE_STEP
    adapters: tuple[str, ...] = ()

    def argv(self) -> list[str]:
        """All Megatron options of the model, on a machine without a GPU."""
        return [*CPU_ARGS, *COMMON, *self.arguments.split()]


FOUR = tuple(range(4))
# Rounding to bfloat16 changes a value by up to 2^-9 of it. A gradient has gone through about 100
# roundings, whose errors add up to about sqrt(100) * 2^-9 = 2e-2 of it.
BF16 = 5e-2
ATTENTION, EXPERTS_TOO = ("linear_qkv", "linear_proj"), ("linear_fc1", "linear_fc2")

MODELS = {
    "base": Model("--num-layers 4", FOUR),
    "even": Model("--num-layers 4", FOUR, multiple=8),
    "holes": Model("--num-layers 4", FOUR, holes=0.3),
    "six": Model("--num-layers 6", tuple(range(6))),
    "moonlight": Model("--num-layers 5 --moe-layer-freq ([0]+[1]*4)", (1, 2, 3, 4)),
    "interleaved": Model("--num-layers 4 --moe-layer-freq 2", (0, 2)),
    "mtp": Model("--num-layers 4 --mtp-num-layers 1", FOUR),
    # for cases with CP, in which upstream weighs the MTP loss by each rank's own number of tokens
    "mtp no loss": Model("--num-layers 4 --mtp-num-layers 1 --mtp-loss-scaling-factor 0", FOUR),
    "hybrid": Model(
        "--hybrid-layer-pattern *E*-*E*E --spec proof.fidelity.hybrid_spec spec", (1, 5, 7)
    ),
    "shared": Model(
        "--num-layers 4 --moe-shared-expert-intermediate-size 32 --moe-shared-expert-overlap", FOUR
    ),
    "deepseek": Model(
        "--num-layers 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 "
        "--moe-router-dtype fp32",
        FOUR,
    ),
    # Auxiliary losses couple the rollouts of a micro-batch. So cases of this model, like the
    # reference, have one rollout in each micro-batch.
    "balanced": Model(
        "--num-layers 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1 1 "
        "--moe-z-loss-coeff 0.1",
        FOUR,
    ),
    "bf16": Model("--num-layers 4 --bf16", FOUR, tolerance=BF16),
    "bf16 fp32 router": Model(
        "--num-layers 4 --bf16 --moe-router-dtype fp32", FOUR, tolerance=BF16
    ),
    "bf16 mtp": Model("--num-layers 4 --bf16 --mtp-num-layers 1", FOUR, tolerance=BF16),
    "mini-steps": Model("--num-layers 4", FOUR, update=TWO_STEPS),
    "R2": Model("--num-layers 4", FOUR, update=replace(TWO_STEPS, source="old-policy")),
    "LoRA": Model("--num-layers 4", FOUR, adapters=(*ATTENTION, *EXPERTS_TOO)),
    "LoRA on attention": Model("--num-layers 4", FOUR, adapters=ATTENTION),
    "temperature": Model("--num-layers 4", FOUR, update=Update(temperature=0.7)),
}
# the first two experts are hot, so the rank that owns them has the most tokens
MODELS |= {f"{name}, skewed": replace(model, hot=2) for name, model in MODELS.items()}
