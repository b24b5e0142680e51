"""Targets of RouterReplay as routes: which rows are bad, unused, counted, and what the host sees.

Shape suffixes (docs/glossary.md): K, L, T.
"""

from __future__ import annotations

import pytest
import torch

from megatron_r3.frameworks.target_routes import TargetRoutes
from megatron_r3.replay.microbatch import ReplayError

T, E, K = 4, 8, 3
GOOD = [[0, 1, 2], [7, 3, 5], [1, 6, 4], [2, 0, 3]]
CPU = torch.device("cpu")


def routes(changes: dict[tuple[int, int], list[int]] | None = None, **options) -> TargetRoutes:
    """Two layers, 3 and 5, of good rows; `changes` sets rows by (layer, token)."""
    targets = {layer: torch.tensor(GOOD) for layer in (5, 3)}
    for (layer, token), row in (changes or {}).items():
        targets[layer][token] = torch.tensor(row)
    return TargetRoutes.of(targets, options.get("unused_T"), E, CPU)


def test_good_targets_are_routes_in_the_order_of_the_layers() -> None:
    made = routes()
    assert made.layers == [3, 5]
    assert made.ids_LTK.dtype == torch.int16
    assert made.ids_LTK.tolist() == [GOOD, GOOD]
    assert made.bad_LT is None
    microbatch = made.microbatch(counts=False)
    assert microbatch.live_T is None
    assert microbatch.tally is None
    assert microbatch.checked


@pytest.mark.parametrize(
    "row", [[1, 1, 2], [2, 5, 2], [-1, 0, 1], [0, 1, 8], [0, 0, 0], [-1, -1, -1], [0, 1, 2**40]]
)
def test_a_row_that_no_router_can_take_is_live_in_its_layer_only(row: list[int]) -> None:
    made = routes({(5, 2): row})
    assert made.bad_LT.tolist() == [[False] * 4, [False, False, True, False]]
    assert made.ids_LTK[1, 2].tolist() == [0, 1, 2]  # what a kernel may read
    live = made.microbatch(counts=False).live_T
    assert {layer: mask.tolist() for layer, mask in live.items()} == {
        3: [False] * 4,
        5: [False, False, True, False],
    }


def test_unused_rows_are_padding_with_spread_experts_and_never_bad() -> None:
    unused_T = torch.tensor([False, True, False, True])
    made = routes({(3, 1): [0, 0, 0], (3, 2): [0, 0, 0]}, unused_T=unused_T)
    assert made.bad_LT.tolist() == [[False, False, True, False], [False] * 4]
    for ids_TK in made.ids_LTK:
        assert ids_TK[1].tolist() == [3, 4, 5]
        assert ids_TK[3].tolist() == [1, 2, 3]  # row 3 of the spread: experts 9, 10, 11 modulo 8
    microbatch = made.microbatch(counts=True)
    assert torch.equal(microbatch.padding_T, unused_T)
    assert torch.equal(microbatch.tally.counted_T, ~unused_T)
    assert made.counted_tokens().tolist() == [1, 2]


def test_the_host_sees_the_ids_and_whether_a_row_is_live() -> None:
    on_host = routes({(5, 0): [4, 4, 4]}).on_host()
    assert on_host.live_T.any(1).tolist() == [False, True]
    assert on_host.ids_LTK[0].tolist() == GOOD
    assert on_host.ids_LTK[1].tolist() == [[0, 0, 0], *GOOD[1:]]
    assert not routes().on_host().live_T.any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.uint16, torch.int32, torch.int64])
def test_every_integer_dtype_is_taken(dtype: torch.dtype) -> None:
    targets = {1: torch.tensor(GOOD).to(dtype)}
    assert TargetRoutes.of(targets, None, E, CPU).ids_LTK[0].tolist() == GOOD


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({1: torch.tensor(GOOD).float()}, "layer 1: the target holds torch.float32"),
        ({1: torch.tensor(GOOD) > 0}, "layer 1: the target holds torch.bool"),
        ({1: torch.tensor(GOOD).numpy()}, "layer 1: the target is a ndarray, not a tensor"),
        (
            {1: torch.tensor(GOOD)[None]},
            r"layer 1: the target has the shape \[1, 4, 3\], not \[tokens, topk\]",
        ),
        ({1: torch.tensor(GOOD), 2: torch.tensor(GOOD[:2])}, r"different shapes: \{1: \[4, 3\]"),
    ],
)
def test_targets_that_are_no_routes_are_refused(targets, message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        TargetRoutes.of(targets, None, E, CPU)
