"""LoRA adapters of Megatron-Bridge: models that have them replay, and are written merged.

All weights but the adapters' are frozen, those of the routers too. The fidelity table has cases of
adapters in plain torch in more layouts, and on attention alone (`proof/fidelity/cases.py`).

Shape suffixes (docs/glossary.md): B, E, K, L, S, T, V.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bridge_models import build
from client_workers import from_clone, worker_with
from replay_layouts import (
    LAYOUTS,
    MICROBATCHES,
    Data,
    Step,
    live,
    own_rows,
    replay_natively,
    run_step,
)
from transformers import AutoModelForCausalLM

from megatron_r3 import ModelRoutes, RouteArrays, replaying
from megatron_r3.data.fingerprint import policy_stamp
from megatron_r3.weights.write_policy import read_policy, write_policy
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.tiny import BATCH, EXPERTS, LAYERS, SEQUENCE, TOPK, VOCABULARY, start

ATTENTION = ("linear_qkv", "linear_proj")
ALL = (*ATTENTION, "linear_fc1", "linear_fc2")
BRIDGE = "megatron-bridge"


@pytest.fixture(scope="module", params=["0.3.1", "0.6.0"])
def bridge(
    request: pytest.FixtureRequest,
    clients: Path,
    patched_tree: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[TreeWorker]:
    if request.param == "0.6.0":  # not on PyPI
        folder = from_clone("BRIDGE", ["src/megatron"], tmp_path_factory.mktemp("bridge")) / "src"
    else:
        folder = clients / f"{BRIDGE}-{request.param}"
    with worker_with(patched_tree, [folder, clients / "site"], "import_bridge") as worker:
        yield worker


def replayed(rank: int, layout: str, recompute: str) -> dict[str, Any]:
    """A step by the recorded routes, and two controls."""
    start(**LAYOUTS[layout][1])
    chunks = build(BRIDGE, layout, recompute, adapters=ALL, moe_router_replay=True)
    data = Data()
    own = [own_rows(ids_LTK, chunks[0]) for ids_LTK in data.routes]

    def measured(step: Step) -> tuple[int, int, torch.Tensor | None, dict[str, torch.Tensor]]:
        return len(step.maps), step.wrong_passes(own), step.loss, step.gradients

    shifted = [ids_LTK.roll(1, 1) for ids_LTK in data.routes]
    return {
        "trained": [n for c in chunks for n, p in c.named_parameters() if p.requires_grad],
        "step": measured(run_step(chunks, data, replay_natively)),
        "live": measured(run_step(chunks, data, live)),
        "token": measured(run_step(chunks, data, replay_natively, shifted)),
    }


@pytest.mark.parametrize("layout", ["EP2", "TP2 SP", "PP2 VPP2"])
def test_a_model_with_adapters_replays(bridge: TreeWorker, layout: str) -> None:
    ranks = LAYOUTS[layout][0]
    one = bridge.run(replayed, 1, "1", "none")[0]["step"][2]
    results = {
        recompute: bridge.run(replayed, ranks, layout, recompute, timeout_s=180)
        for recompute in ("none", "full")
    }
    for recompute, of_ranks in results.items():
        for result in of_ranks:
            assert all(".adapter." in name for name in result["trained"])
            layers = LAYERS // 2 if "PP2" in layout else LAYERS
            passes = layers * MICROBATCHES * (1 if recompute == "none" else 2)
            assert result["step"][:2] == (passes, 0)
            for control in ("live", "token"):
                assert result[control][:2] == (passes, passes)
            if (loss := result["step"][2]) is not None:
                torch.testing.assert_close(loss, one, rtol=1e-5, atol=0)
                for control in ("live", "token"):
                    assert abs(result[control][2] - one) > 1e-3 * one
    for none, full in zip(results["none"], results["full"], strict=True):
        gradients, again = none["step"][3], full["step"][3]
        assert gradients.keys() == again.keys()
        without = [n for n in none["trained"] if all(not name.endswith(n) for name in gradients)]
        assert all(".experts." in name for name in without)  # no token came to these
        assert all(torch.equal(gradient, gradients[name]) for name, gradient in again.items())
        assert not all(
            torch.equal(gradient, gradients[name]) for name, gradient in full["live"][3].items()
        )


def with_guests(
    rank: int, guests: int, adapters: tuple[str, ...], shift: int = 0
) -> dict[str, torch.Tensor]:
    """The gradients of a wrapped model whose first two experts are hot; its plan is checked.

    Args:
        guests: guest slots of a rank; 0: no guests.
        shift: replay the routes of the token this far before.
    """
    start(expert_model_parallel_size=2)
    options: dict[str, Any] = {"moe_router_replay": True, "moe_router_replay_verify_plan": True}
    if guests:
        options |= {
            "moe_router_replay_guest_slots": guests,
            "moe_router_replay_guest_tokens": 1,
        }
    (model,) = build(BRIDGE, "EP2", "none", wrapped=True, adapters=adapters, **options)
    generator = torch.Generator().manual_seed(rank)
    odds_E = torch.tensor([8.0] * 2 + [1.0] * (EXPERTS - 2))
    drawn = torch.multinomial(
        odds_E.expand(LAYERS * BATCH * SEQUENCE, -1), TOPK, generator=generator
    )
    source = RouteArrays(drawn.view(LAYERS, -1, TOPK).numpy(), EXPERTS, range(LAYERS))
    # a router sees tokens in the order [S, B]: token s of sample b is row s * BATCH + b
    rows_BS = torch.arange(SEQUENCE * BATCH).reshape(SEQUENCE, BATCH).T.contiguous()
    tokens_BS = Data(rank).tokens[0]
    positions_BS = torch.arange(SEQUENCE).expand(BATCH, -1)
    model.zero_grad_buffer()
    with replaying(ModelRoutes(model).microbatch(source, rows_BS.roll(shift, 1))):
        output = model(tokens_BS[:, :-1], positions_BS, None, labels=tokens_BS[:, 1:])
    output.sum().backward()
    trained = ((n, p) for n, p in model.module.module.named_parameters() if p.requires_grad)
    return {name: parameter.main_grad.clone() for name, parameter in trained}


@pytest.mark.parametrize("adapters", [ATTENTION, ALL], ids=["attention", "experts too"])
def test_guests_bring_their_adapters(bridge: TreeWorker, adapters: tuple[str, ...]) -> None:
    without, guests, shifted = (
        bridge.run(with_guests, 2, slots, adapters, shift)
        for slots, shift in ((0, 0), (2, 0), (2, 1))
    )

    def error(result: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
        pairs = [(result[name], grad) for name, grad in want.items()]
        square = sum(float((got - grad).norm() ** 2) for got, grad in pairs)
        return float((square / sum(float(grad.norm() ** 2) for _, grad in pairs)) ** 0.5)

    errors = [error(*of_rank) for of_rank in zip(guests, without, strict=True)]
    assert max(errors) < 5e-2  # bfloat16, as in proof/fidelity/models.py
    # the gradients of guests were summed in another order, so there were guests
    assert adapters == ATTENTION or max(errors) > 0
    assert min(error(*of_rank) for of_rank in zip(shifted, without, strict=True)) > 5e-2


def written(rank: int, layout: str, out: Path, scale: float = 1.0) -> torch.Tensor | None:
    """Write the model with its adapters; a single process also computes its logits [B, S, V]."""
    start(**LAYOUTS[layout][1])
    chunks = build(BRIDGE, layout, "none", adapters=ALL, moe_router_replay=True)
    with torch.no_grad():
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if "linear_out" in name:
                    parameter *= scale
    for dtype in (torch.float32, torch.bfloat16):
        write_policy(chunks, out / str(dtype)[6:], dtype=dtype, vocab_size=VOCABULARY)
    if layout != "1":
        return None
    positions_BS = torch.arange(SEQUENCE).expand(BATCH, -1)
    logits_BSV: torch.Tensor = chunks[0](Data().tokens[0][:, :-1], positions_BS, None)
    return logits_BSV.detach()


def test_a_policy_is_written_with_its_adapters(bridge: TreeWorker, tmp_path: Path) -> None:
    logits_BSV = bridge.run(written, 1, "1", tmp_path / "1")[0]
    tokens_BS = Data().tokens[0][:, :-1]

    def of_transformers(name: str) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name / "float32")
        with torch.no_grad():
            logits: torch.Tensor = model(tokens_BS).logits
        return logits

    torch.testing.assert_close(of_transformers("1"), logits_BSV, rtol=1e-4, atol=1e-4)
    for other, scale in {"without": 0.0, "other": 2.0}.items():
        bridge.run(written, 1, "1", tmp_path / other, scale)
        assert (of_transformers(other) - logits_BSV).abs().max() > 0.1
    for layout in ("EP2", "TP2 SP", "PP2", "PP2 VPP2"):
        bridge.run(written, 2, layout, tmp_path / layout)
    for dtype in ("float32", "bfloat16"):
        digests = {p.name: policy_stamp(p / dtype) for p in tmp_path.iterdir()}
        one, without, other = (digests.pop(name) for name in ("1", "without", "other"))
        assert set(digests.values()) == {one}
        assert len({one, without, other}) == 3


def refused(rank: int, out: Path) -> list[str]:
    """What is said of adapters that cannot be merged, and of a model that must not be read into."""
    from megatron.bridge.peft.dora import DoRA

    start()
    messages = []

    def saying(call: Any) -> None:
        with pytest.raises(ValueError) as said:
            call()
        messages.append(str(said.value))

    (chunk,) = build(BRIDGE, "1", "none", adapters=ALL, moe_router_replay=True)

    def write() -> None:
        write_policy([chunk], out, vocab_size=VOCABULARY)

    write_policy([chunk], out.with_name("right"), vocab_size=VOCABULARY)
    saying(lambda: read_policy([chunk], out.with_name("right")))
    first = chunk.decoder.layers[0].self_attention
    first.linear_qkv.disable_adapter_layers()
    saying(write)
    first.linear_qkv.enable_adapter_layers()
    first.linear_qkv.adapter.alpha = 3
    saying(write)
    (chunk,) = build(BRIDGE, "1", "none", moe_router_replay=True)
    DoRA(target_modules=["linear_proj"], dim=4)(chunk, training=True)
    saying(write)
    return messages


def test_what_cannot_be_merged_is_refused(bridge: TreeWorker, tmp_path: Path) -> None:
    read, off, alphas, dora = bridge.run(refused, 1, tmp_path / "out")[0]
    assert "adapters?" in read
    assert ".adapter.linear_in.weight" in read
    assert off == "the model's LoRA adapters are off: call enable_adapter_layers first"
    assert alphas == "the model's LoRA adapters have the alphas [3.0, 8.0]; give all the same"
    assert "weight_magnitude" in dora
    assert not (tmp_path / "out").exists()
