"""An unmodified Megatron on the CPU: what is put in the place of TE's attention is right.

Each case is a function that the ranks of a worker run; only there is Megatron imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_r3.cpu.attention import thd_index, zigzag
from megatron_r3.cpu.errors import NotEmulated
from proof.fidelity import tiny
from proof.fidelity.rig.worker import TreeWorker


@pytest.fixture(scope="module")
def worker(megatron_tree: Path) -> Iterator[TreeWorker]:
    with TreeWorker(megatron_tree, preload=["megatron.core.models.gpt.gpt_layer_specs"]) as worker:
        yield worker


def config(cp: int = 1, **options: Any) -> Any:
    """A config that an unpatched tree takes."""
    return tiny.config(moe_router_replay=False, context_parallel_size=cp, **options)


def attend(rank: int, cp: int, lengths: list[int], packed: bool, **options: Any) -> Any:
    """This rank's part of attention's output and of the gradients of its inputs."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    tiny.start(context_parallel_size=cp)
    attention = DotProductAttention(config(cp=cp, **options), 1, AttnMaskType.causal, "self")
    generator = torch.Generator().manual_seed(5)
    whole = [torch.randn(sum(lengths), 1, n, 8, generator=generator) for n in (4, 2, 2, 4)]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    mine = thd_index(bounds, cp, rank) if packed else zigzag(sum(lengths), cp, rank)
    *inputs, weight = (tensor[mine] for tensor in whole)
    if packed:
        inputs = [tensor.squeeze(1) for tensor in inputs]
    for tensor in inputs:
        tensor.requires_grad_()
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    output = attention(*inputs, None, packed_seq_params=params if packed else None)
    (output * weight.reshape(output.shape)).sum().backward()
    results = torch.cat([t.detach().flatten(1) for t in (output, *(t.grad for t in inputs))], 1)
    return mine, results


def joined(parts: list[Any]) -> torch.Tensor:
    """The ranks' parts, in the order of the whole sequence."""
    order = torch.cat([mine for mine, _ in parts])
    return torch.cat([results for _, results in parts])[order.argsort()]


def test_attention_with_cp_is_attention_without(worker: TreeWorker) -> None:
    """Without CP it is Megatron's own code that runs."""
    (whole,) = worker.run(attend, 1, 1, [24], False)
    split = joined(worker.run(attend, 2, 2, [24], False))
    torch.testing.assert_close(split, whole[1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("cp", [1, 2])
def test_packed_attention_is_each_sequence_alone(worker: TreeWorker, cp: int) -> None:
    lengths = [8, 4, 12]
    packed = joined(worker.run(attend, cp, cp, lengths, True))
    (as_one,) = worker.run(attend, 1, 1, [24], False)
    (first,) = worker.run(attend, 1, 1, [24], True)
    torch.testing.assert_close(first[1], as_one[1], atol=1e-6, rtol=1e-5)
    # the first sequence does not know what follows; a later one differs from the unpacked
    torch.testing.assert_close(packed[:8, :32], as_one[1][:8, :32], atol=1e-6, rtol=1e-5)
    assert not torch.allclose(packed[8:, :32], as_one[1][8:, :32], atol=1e-2)


def packed_against_alone(rank: int) -> float:
    """The largest difference between packed (with padding) and separate sequences."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    tiny.start()
    attention = DotProductAttention(config(), 1, AttnMaskType.causal, "self")
    real, padded = [5, 8, 3], [8, 8, 4]
    inputs = [torch.randn(sum(padded), n, 8) for n in (4, 2, 2)]
    bounds, padded_bounds = (torch.tensor([0, *n]).cumsum(0).int() for n in (real, padded))
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=padded_bounds,
        cu_seqlens_kv_padded=padded_bounds,
    )
    packed = attention(*inputs, None, packed_seq_params=params)
    assert packed.isfinite().all()
    worst = 0.0
    for begin, length in zip(padded_bounds.tolist(), real, strict=False):
        part = slice(begin, begin + length)
        alone = attention(*(tensor[part].unsqueeze(1) for tensor in inputs), None)
        worst = max(worst, (packed[part] - alone.squeeze(1)).abs().max().item())
    return worst


def test_padding_between_packed_sequences_is_not_seen(worker: TreeWorker) -> None:
    assert worker.run(packed_against_alone, 1)[0] < 1e-6


def refused_attention(rank: int) -> list[str]:
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    tiny.start(context_parallel_size=2)
    tensors = [torch.randn(8, 1, n, 8) for n in (4, 2, 2)]
    hides_nothing = torch.zeros(1, 1, 8, 16, dtype=torch.bool)
    messages = []
    for kind, mask, options in (
        (AttnMaskType.no_mask, None, {}),
        (AttnMaskType.causal, hides_nothing, {}),
        (AttnMaskType.causal, None, {"window_size": (4, 0)}),
        (AttnMaskType.causal, None, {"softmax_type": "off-by-one"}),
    ):
        attention = DotProductAttention(config(cp=2, **options), 1, kind, "self")
        with pytest.raises(NotEmulated) as error:
            attention(*tensors, mask)
        messages.append(str(error.value))
    return messages


def test_attention_refuses_what_it_does_not_do(worker: TreeWorker) -> None:
    messages = worker.run(refused_attention, 2)[0]
    for message, text in zip(
        messages, ("no_mask", "causal attention mask", "window_size", "softmax_type"), strict=True
    ):
        assert text in message


def index_builder(rank: int) -> str:
    import numpy
    from megatron.core import datasets
    from megatron.core.datasets import utils

    from megatron_r3.cpu import megatron_gaps

    del datasets.__path__[1:]
    megatron_gaps.patch_index_builder()  # with the cache of this case
    utils.compile_helpers()
    from megatron.core.datasets import helpers, helpers_cpp

    index = helpers.build_sample_idx(numpy.array([9], "int32"), numpy.array([0], "int32"), 4, 1, 9)
    assert index.tolist() == [[0, 0], [0, 4], [0, 8]]
    return str(helpers_cpp.__file__)


def test_the_index_builder_compiles_outside_of_the_tree(worker, megatron_tree, tmp_path):
    (file,) = worker.run(index_builder, 1, env={"XDG_CACHE_HOME": str(tmp_path)})
    assert tmp_path in Path(file).parents
    assert not list(megatron_tree.rglob("helpers_cpp*"))
