"""Quantized weights in two formats: DeepSeek-V3's blocks of fp8, and gpt-oss's mxfp4.

fp8 (transformers' FineGrainedFP8Config): a matrix `NAME` in float8_e4m3fn, and in `NAME_scale_inv`
a number for each block, for example of 128 x 128. An entry is its fp8 value times the number of its
block. Example: a matrix of 576 rows has 5 rows of blocks, of which the last one is 64 rows high.

mxfp4 (transformers' Mxfp4Config): of the experts' matrices, all experts of a layer in one tensor,
`NAME_blocks` has two values of 4 bits in each byte, and `NAME_scales` an exponent for each 32
values. Both are transposed: consecutive values belong to one column of `NAME`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]
# the numbers for the lower three of 4 bits; the fourth bit is the sign
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# the stored exponent of 2**0, and the largest stored exponent with which 6.0 fits into bfloat16
_ONE, _LARGEST = 127, 252


@dataclass(frozen=True)
class Fp8:
    """Matrices in blocks of fp8.

    Attributes:
        block: rows and columns of a block.
    """

    block: tuple[int, int]

    def parts(self, stored: Iterable[str]) -> dict[str, tuple[str, str]]:
        """The names of each quantized tensor's values and scales, by the tensor's own name.

        Args:
            stored: the names of all tensors in the files.
        """
        names = {*stored}
        return {n: (n, scale) for n in names if (scale := f"{n}_scale_inv") in names}

    def shape(self, values: Shape) -> Shape:
        """A tensor's shape, computed from the shape of its stored values."""
        return values

    def dequantized(self, values: Tensor, scales: Tensor) -> Tensor:
        """The tensor in float32: its values times the scales of their blocks.

        Raises:
            ValueError: a dtype or a shape does not fit.
        """
        blocks = tuple(-(-size // of) for size, of in zip(values.shape, self.block, strict=False))
        if values.dtype != torch.float8_e4m3fn or not scales.is_floating_point():
            raise ValueError(
                f"{values.dtype} with scales in {scales.dtype}; expected float8_e4m3fn with float "
                "scales"
            )
        if values.dim() != 2 or tuple(scales.shape) != blocks:
            raise ValueError(
                f"scales {tuple(scales.shape)} for {tuple(values.shape)} in blocks of "
                f"{self.block}; expected scales {blocks}"
            )
        rows, columns = values.shape
        each = scales.float().repeat_interleave(self.block[0], 0)[:rows]
        return values.float() * each.repeat_interleave(self.block[1], 1)[:, :columns]


class Mxfp4:
    """The experts of gpt-oss in mxfp4."""

    def parts(self, stored: Iterable[str]) -> dict[str, tuple[str, str]]:
        """See `Fp8.parts`."""
        names = {*stored}
        owners = {n.removesuffix("_blocks") for n in names if n.endswith("_blocks")} - names
        return {n: (f"{n}_blocks", f"{n}_scales") for n in owners if f"{n}_scales" in names}

    def shape(self, values: Shape) -> Shape:
        """See `Fp8.shape`. Example: blocks [32, 5760, 90, 16] are a tensor [32, 2880, 5760]."""
        experts, columns, groups, size = values
        return experts, 2 * groups * size, columns

    def dequantized(self, values: Tensor, scales: Tensor) -> Tensor:
        """The tensor in bfloat16, which holds each product of value and scale exactly.

        Raises:
            ValueError: a dtype, a shape or an exponent does not fit.
        """
        if values.dtype != torch.uint8 or scales.dtype != torch.uint8:
            raise ValueError(f"{values.dtype} with {scales.dtype}; expected uint8 with uint8")
        if values.dim() != 4 or scales.shape != values.shape[:-1]:
            raise ValueError(
                f"scales {tuple(scales.shape)} for blocks {tuple(values.shape)}; expected four "
                "dimensions, and scales for all but the last one"
            )
        if scales.max() > _LARGEST:
            raise ValueError(f"a scale is {int(scales.max())}; expected at most {_LARGEST}")
        # one expert after the other, because the indices need eight times the room of the bytes
        experts = [_values_of(*expert) for expert in zip(values, scales, strict=True)]
        return torch.stack(experts).transpose(1, 2)


Format = Fp8 | Mxfp4  # how the quantized tensors of a directory are stored


def _values_of(blocks: Tensor, scales: Tensor) -> Tensor:
    """The numbers of one expert's matrix, in the stored order: transposed."""
    table = torch.tensor([*_FP4, *(-value for value in _FP4)], dtype=torch.bfloat16)
    powers = torch.ldexp(torch.ones(_LARGEST + 1), torch.arange(_LARGEST + 1) - _ONE).bfloat16()
    # the lower four bits of a byte come first
    numbers = table[torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).int()]
    return (numbers * powers[scales.int()].unsqueeze(-1)).flatten(-2)


def format_of(hf_config: Mapping[str, Any]) -> Format | None:
    """The format that a config.json names; None if it names none, or one that cannot be read."""
    quantized = hf_config.get("quantization_config")
    if not isinstance(quantized, Mapping):
        return None
    method, block = quantized.get("quant_method"), quantized.get("weight_block_size")
    if method == "mxfp4" and hf_config.get("model_type") == "gpt_oss":
        return Mxfp4()
    if method != "fp8" or not isinstance(block, list) or len(block) != 2:
        return None
    rows, columns = block
    whole = all(type(size) is int and size > 0 for size in block)
    return Fp8((rows, columns)) if whole else None
