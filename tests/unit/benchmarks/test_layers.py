"""`python -m proof.benchmarks.layers`: what it compares and what it skips.

Steps of Megatron's layers are run by `make gpu REHEARSE=1`; here a stand-in takes them.

Shape suffixes (docs/glossary.md): T, E, K.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_r3.replay.gate import GateInputs, GateOptions, replayed_gate
from proof.benchmarks import layers
from proof.benchmarks.layers_measure import check
from proof.benchmarks.layers_model import LIVE_FUSED, Way, ways_of
from proof.benchmarks.machine import no_transformer_engine

PLAIN = SimpleNamespace(moe_router_group_topk=None)


class Steps:
    """Takes steps of 2 routers; `losses` and `passes` of a way can be made wrong."""

    def __init__(self, losses: dict[str, list[float]] | None = None, passes: int = 1) -> None:
        self.ways, self.skipped = ways_of(PLAIN, "te")
        self.sizes, self.cuda = SimpleNamespace(layers=2), False
        self.routers = [torch.nn.Linear(2, 4) for _ in range(2)]
        self.losses, self.passes = losses or {}, passes
        self.grads = dict[str, float]()

    def name(self, way: Way) -> str:
        return next(name for name, other in self.ways.items() if other == way)

    def step(self, way: Way, recompute: bool) -> tuple[torch.Tensor, Any]:
        name = self.name(way)
        for router in self.routers * (self.passes + recompute):
            logits_TE = router(torch.ones(3, 2))
            if way.fused and way.replays:
                ids_TK = torch.zeros(3, 1, dtype=torch.uint8)
                replayed_gate(GateInputs(logits_TE, ids_TK), GateOptions())
        self.last = self.grads.get(name, 1.0)
        losses = self.losses.get(name, [1.0])
        return torch.tensor(losses.pop(0) if len(losses) > 1 else losses[0]), None

    def gradient(self) -> torch.Tensor:
        return torch.tensor([1.0, self.last])


def agreeing(steps: Any) -> dict[str, bool]:
    found = check(steps, False, (1e-3, 2e-2))
    return {name: values["agrees"] for name, values in found.items()}


def test_equal_steps_agree() -> None:
    assert all(agreeing(Steps()).values())


@pytest.mark.parametrize(
    ("way", "loss", "agrees"),
    [
        ("replay", 1.0 + 1e-6, False),  # unfused: to the bit
        ("plan, fused", 1.0 + 1e-4, True),
        ("plan, fused", 1.0 + 1e-2, False),
        (LIVE_FUSED, 1.0 + 5e-3, True),  # another top-k: other experts among equals
        (LIVE_FUSED, 1.05, False),
    ],
)
def test_another_loss_is_found(way: str, loss: float, agrees: bool) -> None:
    found = agreeing(Steps({way: [loss]}))
    assert found.pop(way) == agrees
    assert all(found.values())


def test_where_two_live_steps_differ_replay_may_differ_as_fused_ways_may() -> None:
    noisy = {"live": [1.0, 1.0 + 1e-5, 1.0], "replay": [1.0 + 2e-5], "plan": [1.01]}
    found = check(Steps(noisy), False, (1e-3, 2e-2))
    assert {values["repeat_error"] for values in found.values()} != {0.0}
    assert found["replay"]["agrees"]
    assert not found["plan"]["agrees"]


def test_other_gradients_are_found() -> None:
    steps = Steps()
    steps.grads = {"plan": 1.2, LIVE_FUSED: 1.2}
    found = agreeing(steps)
    assert not found["plan"]
    assert found[LIVE_FUSED]  # only its loss is compared


def test_a_step_that_ran_otherwise_than_its_name_says() -> None:
    with pytest.raises(AssertionError, match="live: 4 passes, not 2"):
        check(Steps(passes=2), False, (1e-3, 2e-2))


MISSING = "Transformer Engine is not installed"


@pytest.mark.skipif(no_transformer_engine() != MISSING, reason="Transformer Engine is here")
def test_without_transformer_engine_the_step_is_skipped(tmp_path, capsys):
    out = ["--out", str(tmp_path), "--megatron", str(tmp_path), "--rehearse"]
    assert layers.main([*out, "--spec", "te"]) == 77
    assert capsys.readouterr().out == f"skipped: {MISSING}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_transformer_engine_that_is_not_compiled_is_said(tmp_path, monkeypatch):
    """Its pure Python package alone raises a RuntimeError when it is imported."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('Found empty\\nmeta package')")
    monkeypatch.syspath_prepend(tmp_path)
    said = no_transformer_engine()
    assert said == "Transformer Engine cannot be imported: Found empty meta package"
