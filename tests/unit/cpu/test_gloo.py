"""Gloo does what Megatron takes from NCCL: uneven sizes, and sends of tensors freed at once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_r3.cpu import NotEmulated, gloo
from proof.fidelity.rig.forkserver import run_ranks

SIZES = [3, 0, 2]


def on_gloo(case: Callable[[int], Any], world_size: int, patched: bool = True) -> list[Any]:
    def run(rank: int) -> Any:
        if patched:
            gloo.patch()
        dist.init_process_group("gloo", timeout=timedelta(seconds=20))
        return case(rank)

    return run_ranks(run, world_size, timeout_s=60)


@pytest.mark.parametrize("group_of", [lambda: None, lambda: dist.new_group([2, 0, 1])])
def test_uneven_all_gather(group_of: Callable[[], Any]) -> None:
    def case(rank: int) -> list[list[int]]:
        group = group_of()
        me = dist.get_rank(group)
        parts = [torch.full((size,), -1) for size in SIZES]
        dist.all_gather(parts, torch.full((SIZES[me],), 10 + me), group=group)
        return [part.tolist() for part in parts]

    assert on_gloo(case, 3) == [[[10, 10, 10], [], [12, 12]]] * 3


def test_uneven_reduce_scatter() -> None:
    def case(rank: int) -> list[int]:
        output = torch.full((SIZES[rank],), -1)
        inputs = [torch.full((size,), 10 * rank + i) for i, size in enumerate(SIZES)]
        kept = [part.clone() for part in inputs]
        dist.reduce_scatter(output=output, input_list=inputs, group=None)
        assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))
        return output.tolist()

    assert on_gloo(case, 3) == [[30, 30, 30], [], [36, 36]]


def test_even_collectives_are_torchs_own() -> None:
    def case(rank: int) -> list[Any]:
        parts = [torch.empty(2) for _ in range(2)]
        work = dist.all_gather(parts, torch.full((2,), float(rank)), async_op=True)
        work.wait()
        output = torch.empty(2)
        dist.reduce_scatter(output, parts, op=dist.ReduceOp.MAX)
        return [part.tolist() for part in (*parts, output)]

    assert on_gloo(case, 2) == [[[0, 0], [1, 1], [0, 0]], [[0, 0], [1, 1], [1, 1]]]


def test_uneven_and_asynchronous_is_refused() -> None:
    def case(rank: int) -> str:
        with pytest.raises(NotEmulated) as error:
            dist.all_gather([torch.ones(1), torch.ones(2)], torch.ones(rank + 1), async_op=True)
        return str(error.value)

    assert "all_gather" in on_gloo(case, 2)[0]


def send_and_overwrite(rank: int) -> list[float]:
    """What rank 1 gets of a tensor that rank 0 overwrites before rank 1 asks for it."""
    tensor = torch.full((1000,), float(rank))
    if rank == 0:
        tensor.fill_(7.0)
        work = dist.isend(tensor, 1)
        tensor.fill_(-1.0)
        dist.barrier()
        work.wait()
        return []
    dist.barrier()
    dist.irecv(tensor, 0).wait()
    return tensor.unique().tolist()


def test_a_sent_tensor_may_be_overwritten_at_once() -> None:
    assert on_gloo(send_and_overwrite, 2)[1] == [7.0]


def test_which_gloo_alone_does_not_allow() -> None:
    """The negative control: without the copy the schedules would train on junk."""
    assert on_gloo(send_and_overwrite, 2, patched=False)[1] == [-1.0]


def test_a_batch_of_sends_copies_too() -> None:
    def case(rank: int) -> float:
        mine, other = torch.full((1000,), float(rank)), torch.empty(1000)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]
        )
        mine.data = torch.empty(1)  # what deallocate_pipeline_outputs does
        for work in works:
            work.wait()
        return other.unique().item()

    assert on_gloo(case, 2) == [1.0, 0.0]


def test_copies_are_kept_only_until_they_are_sent() -> None:
    def case(rank: int) -> int:
        gloo._MAX_IN_FLIGHT = 4
        tensor = torch.zeros(10)
        for i in range(20):
            if rank == 0:
                dist.isend(tensor.fill_(i), 1)
            else:
                dist.recv(tensor, 0)
                assert tensor.unique().item() == i
        dist.barrier()
        return len(gloo._in_flight)

    assert on_gloo(case, 2)[0] <= 4
