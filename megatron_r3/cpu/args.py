"""The arguments that a Megatron pretrain script needs on a machine without a GPU."""

from __future__ import annotations

CPU_ARGS: tuple[str, ...] = (
    "--distributed-backend=gloo",
    "--use-cpu-initialization",
    "--transformer-impl=local",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
    "--no-persist-layer-norm",
)
"""Gloo instead of NCCL, weights initialised on the CPU, and nothing of Transformer Engine or apex.

Nothing adds them for you: a script may not be Megatron's own, and what it parses is not known here.
"""
