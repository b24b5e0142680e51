"""Matrices in fp8 with a scale for each block, which may be cut off at the edges; mxfp4."""

from __future__ import annotations

import pytest
import torch

from megatron_r3.weights.quantized import Fp8, Mxfp4, format_of

FP8 = Fp8((4, 3))


def test_each_value_has_the_scale_of_its_block() -> None:
    eighths = torch.arange(70).remainder(13).view(10, 7).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0], [64.0, 128.0, 256.0]])
    got = FP8.dequantized(eighths, scale)
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
        FP8.dequantized(weight, torch.ones(shape))


def test_types_that_do_not_fit() -> None:
    weight, scale = torch.zeros(10, 7), torch.ones(3, 3)
    with pytest.raises(ValueError, match=r"torch.float32 with .*; expected float8_e4m3fn with"):
        FP8.dequantized(weight, scale)
    eighths = weight.to(torch.float8_e4m3fn)
    with pytest.raises(
        ValueError, match=r"with scales in torch.uint8; expected"
    ):  # exponents: 127 is 1.0
        FP8.dequantized(eighths, scale.to(torch.uint8))


def test_which_config_is_read() -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert format_of({"quantization_config": fp8}) == Fp8((128, 128))
    mxfp4 = {"quant_method": "mxfp4"}
    assert isinstance(format_of({"quantization_config": mxfp4, "model_type": "gpt_oss"}), Mxfp4)
    for other in (None, "fp8", {**fp8, "quant_method": "mxfp4"}, {"quant_method": "fp8"}):
        assert format_of({"quantization_config": other}) is None


def blocks(rows: int = 255) -> torch.Tensor:
    """Random bytes [2 experts, rows, 3 groups, 16]."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (2, rows, 3, 16), generator=generator).byte()


def test_mxfp4_has_the_values_of_transformers() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    values = blocks(253)
    scales = torch.arange(253).byte().view(1, -1, 1).repeat(2, 1, 3)  # every exponent
    got = Mxfp4().dequantized(values, scales)
    assert tuple(got.shape) == Mxfp4().shape(tuple(values.shape)) == (2, 96, 253)
    assert got.isfinite().all()
    for dtype in (torch.bfloat16, torch.float32):
        want = mxfp4.convert_moe_packed_tensors(values, scales, dtype=dtype)
        assert torch.equal(got.to(dtype), want)
    # the control: the other half of a byte is another value
    assert not torch.equal(Mxfp4().dequantized(values >> 4 | values << 4, scales), got)


def test_mxfp4_that_does_not_fit() -> None:
    values, scales = blocks(), blocks()[..., 0] // 2
    Mxfp4().dequantized(values, scales)
    for wrong, other, words in (
        (values.float(), scales, "torch.float32 with torch.uint8; expected uint8"),
        (values, scales.int(), "torch.uint8 with torch.int32; expected uint8"),
        (
            values,
            scales[:, 1:],
            r"scales \(2, 254, 3\) for blocks \(2, 255, 3, 16\); expected four",
        ),
        (values[0], scales[0], "expected four dimensions"),
        (values, scales | 253, "a scale is 255; expected at most 252"),
    ):
        with pytest.raises(ValueError, match=words):
            Mxfp4().dequantized(wrong, other)


def test_the_parts_of_a_tensor() -> None:
    names = ["a", "a_scale_inv", "b_blocks", "b_scales", "c_blocks", "d_blocks", "d_scales", "d"]
    assert FP8.parts(names) == {"a": ("a", "a_scale_inv")}
    # half a tensor, and one that is there twice, are left for the reader to refuse
    assert Mxfp4().parts(names) == {"b": ("b_blocks", "b_scales")}
