"""Weights in fp8 with a scale for each block, as DeepSeek-V3 and Qwen3's FP8 models are shipped.

A directory has a matrix `NAME` in float8_e4m3fn, and in `NAME_scale_inv` a number for each block,
for example of 128 x 128; an entry of the matrix is its fp8 value times the number of its block.
Example: a matrix of 576 rows has 5 rows of blocks, of which the last one is 64 rows high.
transformers' FineGrainedFP8Config has the same format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SCALE = "_scale_inv"


def block_of(hf_config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block; None if a config.json describes no weights in blocks of fp8."""
    quantized = hf_config.get("quantization_config")
    if not isinstance(quantized, Mapping) or quantized.get("quant_method") != "fp8":
        return None
    block = quantized.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2:
        return None
    rows, columns = block
    whole = all(type(size) is int and size > 0 for size in block)
    return (rows, columns) if whole else None


def dequantized(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """The values of a matrix in float32.

    Args:
        weight: float8_e4m3fn `[rows, columns]`.
        scale: a float for each block.
        block: rows and columns of a block.

    Raises:
        ValueError: a dtype or shape does not fit; e.g. the scales are exponents in uint8.
    """
    blocks = tuple(-(-size // of) for size, of in zip(weight.shape, block, strict=False))
    if weight.dtype != torch.float8_e4m3fn or not scale.is_floating_point():
        raise ValueError(
            f"{weight.dtype} with scales in {scale.dtype}; expected float8_e4m3fn with float scales"
        )
    if weight.dim() != 2 or tuple(scale.shape) != blocks:
        raise ValueError(
            f"scales {tuple(scale.shape)} for {tuple(weight.shape)} in blocks of {block}; expected "
            f"scales {blocks}"
        )
    rows, columns = weight.shape
    each = scale.float().repeat_interleave(block[0], 0)[:rows]
    return weight.float() * each.repeat_interleave(block[1], 1)[:, :columns]
