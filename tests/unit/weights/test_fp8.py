"""Matrices in fp8 with a scale for each block, which may be cut off at the edges."""

from __future__ import annotations

import pytest
import torch

from megatron_r3.weights.fp8 import block_of, dequantized

BLOCK = (4, 3)


def test_each_value_has_the_scale_of_its_block() -> None:
    eighths = torch.arange(70).remainder(13).view(10, 7).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0], [64.0, 128.0, 256.0]])
    got = dequantized(eighths, scale, BLOCK)
    assert got.dtype == torch.float32
    for row in range(10):
        for column in range(7):
            want = float(eighths[row, column]) * float(scale[row // 4, column // 3])
            assert float(got[row, column]) == want


@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (9,), (3, 3, 1)])
def test_scales_that_do_not_fit(shape: tuple[int, ...]) -> None:
    weight = torch.zeros(10, 7).to(torch.float8_e4m3fn)
    with pytest.raises(
        ValueError, match=r"scales \(.*\) for \(10, 7\) in blocks of \(4, 3\); expected"
    ):
        dequantized(weight, torch.ones(shape), BLOCK)


def test_types_that_do_not_fit() -> None:
    weight, scale = torch.zeros(10, 7), torch.ones(3, 3)
    with pytest.raises(ValueError, match=r"torch.float32 with .*; expected float8_e4m3fn with"):
        dequantized(weight, scale, BLOCK)
    eighths = weight.to(torch.float8_e4m3fn)
    with pytest.raises(
        ValueError, match=r"with scales in torch.uint8; expected"
    ):  # exponents: 127 is 1.0
        dequantized(eighths, scale.to(torch.uint8), BLOCK)


def test_which_config_has_blocks() -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert block_of({"quantization_config": fp8}) == (128, 128)
    for other in (None, "fp8", {**fp8, "quant_method": "mxfp4"}, {"quant_method": "fp8"}):
        assert block_of({"quantization_config": other}) is None
