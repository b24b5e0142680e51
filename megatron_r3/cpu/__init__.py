"""Run an unmodified Megatron-LM on CPU tensors and gloo: for tests, and for laptops.

    torchrun --nproc-per-node 2 -m megatron_r3.cpu pretrain_gpt.py ARGS    (see CPU_ARGS)

A CUDA call runs on the CPU, or raises NotEmulated. The package has its own code for what Megatron
takes from Transformer Engine or NCCL, such as context parallelism, packed sequences and uneven
collectives. Streams and their races, overlap, CUDA graphs, memory and speed are not emulated.
"""

from __future__ import annotations

from megatron_r3.cpu.errors import InstallError, NotEmulated
from megatron_r3.cpu.install import CPU_ARGS, CPU_CONFIG, install

__all__ = ["CPU_ARGS", "CPU_CONFIG", "InstallError", "NotEmulated", "install"]
