"""The flex dispatcher and hybrid models on the CPU, on an unpatched Megatron."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import SEQUENCE, SHAPE, VOCABULARY, batch, model, start

from megatron_r3.cpu import NotEmulated
from proof.fidelity.rig.worker import TreeWorker

HYBRID = "*E*E"
Losses = tuple[torch.Tensor, dict[str, torch.Tensor]]


def config(**options: Any) -> Any:
    """Two layers, eight experts; nothing that only a patched tree knows."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    # float32 router probabilities, as DeepEP has them
    return TransformerConfig(**{**SHAPE, "num_layers": 2, "moe_router_dtype": "fp32", **options})


def step(model: Any, rank: int = 0) -> Losses:
    """Loss and gradients of a batch, another one on each rank."""
    tokens, positions, labels = batch(seed=5 + rank)
    loss = model(tokens, positions, None, labels=labels).sum()
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def difference(one: Losses, other: Losses) -> float:
    """The largest difference, relative to the largest value of each tensor."""
    assert one[1].keys() == other[1].keys()
    pairs = [(one[0], other[0]), *((one[1][name], other[1][name]) for name in one[1])]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs)


def flex_and_alltoall(rank: int, ranks_of_layer: int, options: dict[str, Any]) -> dict[str, Any]:
    """How far the two dispatchers differ, and what DeepEP's stand-in was called for."""
    from deep_ep import Buffer

    start(tensor_model_parallel_size=ranks_of_layer, expert_model_parallel_size=2)
    parallel = {
        "tensor_model_parallel_size": ranks_of_layer,
        "sequence_parallel": ranks_of_layer > 1,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        **options,
    }
    # a TP group has one batch
    mine = rank if ranks_of_layer == 1 else 0
    alltoall = step(model(config(**parallel)), mine)
    calls = {"dispatch": 0, "combine": 0}
    masked = 0

    def counted(name: str) -> None:
        original = getattr(Buffer, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal masked
            calls[name] += 1
            if kwargs.get("topk_idx") is not None:
                masked += int((kwargs["topk_idx"] < 0).sum())
            return original(*args, **kwargs)

        setattr(Buffer, name, call)

    for name in calls:
        counted(name)
    flex_options = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}
    gpt = model(config(**parallel, **flex_options))
    flex = step(gpt, mine)
    gpt.zero_grad(set_to_none=True)
    return {
        "difference": difference(flex, alltoall),
        "another batch": difference(step(gpt, 7), alltoall),
        "calls": calls,
        "masked": masked,
        "expert gradients": sum("experts" in name for name in flex[1]),
    }


@pytest.mark.parametrize(
    ("ranks_of_layer", "options"),
    [
        (1, {"moe_aux_loss_coeff": 1e-2}),
        (2, {}),
        (1, {"moe_expert_capacity_factor": 0.5}),
    ],
    ids=["ep", "tp", "dropped"],
)
def test_flex_is_alltoall(
    unpatched: TreeWorker, ranks_of_layer: int, options: dict[str, Any]
) -> None:
    for got in unpatched.run(flex_and_alltoall, 2, ranks_of_layer, options):
        assert got["difference"] < 1e-6
        assert got["another batch"] > 1e-2
        # two layers, two steps; a combine's backward pass is a dispatch, and the other way round
        assert got["calls"] == {"dispatch": 8, "combine": 8}
        assert (got["masked"] > 0) == ("moe_expert_capacity_factor" in options)
        assert got["expert gradients"] == 2 * 4 * 2  # layers, experts of a rank, weights


def hybrid(pattern: str, **options: Any) -> Any:
    """A HybridModel from the spec, found as `--spec` finds it."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.spec_utils import import_module

    torch.manual_seed(4)
    return HybridModel(
        config(num_layers=len(pattern), is_hybrid_model=True, **options),
        import_module(("megatron_r3.cpu.hybrid_spec", "spec")),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        hybrid_layer_pattern=pattern,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def name_in_hybrid(name: str) -> str:
    """A GPT layer is two layers of a hybrid model: attention, then experts."""
    if name.startswith("decoder.layers."):
        _, _, layer, rest = name.split(".", 3)
        is_attention = rest.startswith(("input_layernorm", "self_attention"))
        return f"decoder.layers.{2 * int(layer) + (not is_attention)}.{rest}"
    return name.replace("final_layernorm", "final_norm")


def hybrid_and_gpt(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """A hybrid model and the GPT with the same weights."""
    start()
    gpt = model(config(**options))
    same = hybrid(HYBRID, **options)
    fresh = step(same)
    same.zero_grad(set_to_none=True)
    weights = {name_in_hybrid(n): p for n, p in gpt.named_parameters()}
    assert weights.keys() == dict(same.named_parameters()).keys()
    same.load_state_dict(weights, strict=False)
    want, gradients = step(gpt)
    gpt_step = want, {name_in_hybrid(n): g for n, g in gradients.items()}
    return {
        "layers": {m.layer_number for m in same.modules() if type(m).__name__ == "MoELayer"},
        "routers": {m.layer_number for m in same.modules() if type(m).__name__ == "TopKRouter"},
        "experts": len(same.decoder.layers[1].mlp.experts.local_experts),
        "norms of queries": sum("q_layernorm" in name for name in weights),
        "final norm": type(same.decoder.final_norm).__name__,
        "difference": difference(step(same), gpt_step),
        "other weights": difference(fresh, gpt_step),
    }


@pytest.mark.parametrize(("experts", "qk_layernorm"), [(8, False), (5, True)])
def test_a_hybrid_model_is_the_gpt_of_its_layers(
    unpatched: TreeWorker, experts: int, qk_layernorm: bool
) -> None:
    options = {"num_moe_experts": experts, "qk_layernorm": qk_layernorm}
    (got,) = unpatched.run(hybrid_and_gpt, 1, options)
    assert got["layers"] == got["routers"] == {2, 4}
    assert (got["experts"], got["final norm"]) == (experts, "RMSNorm")
    assert got["norms of queries"] == 2 * qk_layernorm
    assert got["difference"] < 1e-6
    assert got["other weights"] > 1e-2


def dense_layers(rank: int) -> list[Any]:
    start()
    some = hybrid("*-E")
    loss, gradients = step(some)
    assert loss.isfinite()
    return [type(layer.mlp).__name__ for layer in some.decoder.layers] + [
        all(g.isfinite().all() and g.any() for n, g in gradients.items() if "layers.1." in n)
    ]


def test_a_dense_layer(unpatched: TreeWorker) -> None:
    assert unpatched.run(dense_layers, 1) == [["IdentityOp", "MLP", "MoELayer", True]]


def refused(rank: int, pattern: str) -> str:
    start()
    with pytest.raises(NotEmulated) as error:
        hybrid(pattern)
    return str(error.value)


@pytest.mark.parametrize("pattern", ["M*E", "G*E"])
def test_other_layers_are_refused(unpatched: TreeWorker, pattern: str) -> None:
    assert "attention (*), MLP (-) and MoE (E)" in unpatched.run(refused, 1, pattern)[0]
