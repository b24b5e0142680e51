"""DeepEP's stand-in: who receives which rows, what comes back, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_r3.cpu import NotEmulated
from proof.fidelity.rig import deep_ep
from proof.fidelity.rig.forkserver import run_ranks

RANKS, EXPERTS, HIDDEN = 2, 6, 4
LOCAL = EXPERTS // RANKS
# -1 is no expert: of a token, of a whole token; token 0 of rank 0 has both experts on one rank
IDS = [[[0, 2], [1, 4], [5, -1], [-1, -1], [3, 0]], [[4, 5], [2, 3], [-1, 1]]]


def tokens(rank: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A rank's activations, experts and weights: any process can make those of any rank."""
    generator = torch.Generator().manual_seed(10 * seed + rank)
    ids = torch.tensor(IDS[rank]).view(-1, 2)
    x = torch.randn(len(ids), HIDDEN, generator=generator)
    return x, ids, torch.rand(ids.shape, generator=generator)


def expert(number: int, x: torch.Tensor) -> torch.Tensor:
    return (number + 1) * x + number


def on_gloo(case: Callable[[int, deep_ep.Buffer], Any], world_size: int = RANKS) -> list[Any]:
    def run(rank: int) -> Any:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=20))
        return case(rank, deep_ep.Buffer(dist.group.WORLD))

    return run_ranks(run, world_size, timeout_s=60)


def dispatch(buffer: deep_ep.Buffer, x: torch.Tensor, ids: torch.Tensor, weights: Any) -> Any:
    """As Megatron calls it."""
    per_rank, per_rdma_rank, per_expert, in_rank, event = buffer.get_dispatch_layout(
        ids, EXPERTS, previous_event=None, async_finish=True, allocate_on_comm_stream=True
    )
    return buffer.dispatch(
        x,
        topk_idx=ids,
        topk_weights=weights,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        previous_event=event,
        async_finish=True,
        allocate_on_comm_stream=True,
    )


def expected(rank: int) -> tuple[list[Any], list[Any], list[Any], list[int]]:
    """What a rank receives, token by token; without any communication."""
    rows, ids, weights, counts = [], [], [], [0] * LOCAL
    for sender in range(RANKS):
        for row, row_ids, row_weights in zip(*(t.tolist() for t in tokens(sender)), strict=True):
            mine = [e // LOCAL == rank and e >= 0 for e in row_ids]
            if any(mine):
                rows.append(row)
                ids.append([e % LOCAL if m else -1 for e, m in zip(row_ids, mine, strict=True)])
                weights.append([w if m else 0 for w, m in zip(row_weights, mine, strict=True)])
                for local in ids[-1]:
                    counts[local] += local >= 0
    return rows, ids, weights, counts


def arrivals(rank: int, buffer: deep_ep.Buffer) -> Any:
    x, ids, weights, counts, _, event = dispatch(buffer, *tokens(rank))
    event.current_stream_wait()
    return x.tolist(), ids.tolist(), weights.tolist(), counts


def test_a_rank_receives_one_row_of_each_token_that_has_an_expert_there() -> None:
    assert on_gloo(arrivals) == [expected(0), expected(1)]
    assert expected(0)[1][0] == [0, 2]  # one row for two experts


def test_swapped_ranks_show() -> None:
    """The negative control: with the group's ranks in another order, rows land elsewhere."""

    def case(rank: int, buffer: deep_ep.Buffer) -> Any:
        buffer.rank = 1 - rank
        return arrivals(rank, buffer)

    swapped = on_gloo(case)
    for rank in range(RANKS):
        assert swapped[rank][0] == expected(rank)[0]
        assert swapped[rank][1:] != expected(rank)[1:]


def experts_of(rank: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
    """Each row's weighted sum over this rank's experts."""
    output = torch.zeros_like(x)
    for row, slot in (ids >= 0).nonzero().tolist():
        number = rank * LOCAL + int(ids[row, slot])
        output[row] += weights[row, slot] * expert(number, x[row])
    return output


def round_trip(rank: int, buffer: deep_ep.Buffer) -> tuple[torch.Tensor, torch.Tensor]:
    x, ids, weights, _, handle, _ = dispatch(buffer, *tokens(rank))
    combined, back, _ = buffer.combine(
        experts_of(rank, x, ids, weights), handle, topk_weights=weights
    )
    assert back is not None
    return combined, back


def test_a_round_trip_is_every_expert_in_one_process() -> None:
    for rank, (combined, weights) in enumerate(on_gloo(round_trip)):
        x, ids, gates = tokens(rank)
        want = torch.zeros_like(x)
        for token, slot in (ids >= 0).nonzero().tolist():
            number = int(ids[token, slot])
            want[token] += gates[token, slot] * expert(number, x[token])
        torch.testing.assert_close(combined, want, atol=1e-6, rtol=0)
        # each weight went to one rank only; those of no expert do not come back
        assert torch.equal(weights, gates.masked_fill(ids < 0, 0))


def test_the_handle_of_another_dispatch_shows() -> None:
    """The negative control: a handle with the same counts, of other tokens."""

    def case(rank: int, buffer: deep_ep.Buffer) -> tuple[bool, bool]:
        x, ids, weights = tokens(rank)
        rows, *_, handle, _ = dispatch(buffer, x, ids, weights)
        *_, other, _ = dispatch(buffer, x, ids.flip(0).contiguous(), weights)
        assert other.sent == handle.sent
        combined = buffer.combine(rows, handle)[0]
        return (
            torch.equal(buffer.combine(rows, other)[0], combined),
            torch.equal(buffer.dispatch(x, handle=other)[0], rows),
        )

    assert on_gloo(case) == [(False, False)] * 2


def test_an_option_that_would_change_a_result_is_refused() -> None:
    def case(rank: int, buffer: deep_ep.Buffer) -> str:
        with pytest.raises(NotEmulated) as error:
            buffer.dispatch(tokens(rank)[0], expert_alignment=128)
        return str(error.value)

    said = "deep_ep on the CPU does not emulate expert_alignment: leave these options out"
    assert on_gloo(case) == [said] * 2
