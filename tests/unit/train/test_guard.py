"""Which values of a micro-batch the guard looks at before an update.

Shape suffixes (docs/glossary.md): B, J, S.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_r3.train.guard import StepGuard, _wrong_places

NO_STORE: Any = None  # names are looked up where something is wrong


@pytest.mark.parametrize(("mask", "place"), [([0.0, 0.0, 1.0], -1), ([0.0, 1.0, 1.0], 1)])
def test_a_log_prob_counts_where_its_token_is_of_a_response(mask: list[float], place: int) -> None:
    guard = StepGuard(NO_STORE, scaled=False)
    mask_BS, losses_BS = torch.tensor([mask]), torch.tensor([[1.0, float("inf"), 2.0]])
    host = {"rows": torch.arange(3)[None], "loss_mask": mask_BS}
    guard.add_loss(host, losses_BS, mask_BS, torch.tensor(0.5))
    places_J, _ = _wrong_places(guard._losses)
    assert places_J.tolist() == [place]
