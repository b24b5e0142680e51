"""What the router's load-balancing sees under replay: real tokens, by the load that was asked for.

Shape suffixes (docs/glossary.md): E, K, T.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_r3.replay.active import MicrobatchRoutes, replaying
from megatron_r3.replay.rows import spread_padding
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.tiny import config, start

T, E, K, H = 48, 8, 2, 32
BALANCED: dict[str, Any] = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
    "moe_aux_loss_coeff": [1.0, 1.0],
    "moe_z_loss_coeff": 1e-1,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


def router_of(**options: Any) -> tuple[Any, torch.Tensor]:
    """A router with a preference, and hidden states `[T, 1, H]` to route."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.router import TopKRouter

    made = config(**{**BALANCED, "calculate_per_token_loss": True, **options})
    router = TopKRouter(made, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    router.set_layer_number(1)
    with torch.no_grad():
        router.weight.normal_(0, 1, generator=torch.Generator().manual_seed(2))
    hidden = torch.randn(T, 1, H, generator=torch.Generator().manual_seed(4))
    return router.train(), hidden


def drawn_routes() -> torch.Tensor:
    """Routes `[T, K]` of a skewed load that the router would not choose."""
    generator = torch.Generator().manual_seed(6)
    weights = torch.linspace(0.1, 1, E).expand(T, E)
    return torch.multinomial(weights, K, generator=generator).to(torch.uint8)


def logged_losses() -> dict[str, Any]:
    """Megatron's own table of auxiliary losses, by name."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # up to 0.17
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        return get_moe_layer_wise_logging_tracker()  # type: ignore[no-any-return]
    return get_moe_metrics_tracker().metrics  # type: ignore[no-any-return]


def route(router: Any, hidden: torch.Tensor, microbatch: MicrobatchRoutes | None) -> dict[str, Any]:
    """One pass; what it left: losses by name, counts, and the weight's gradient without a model."""
    logged = logged_losses()
    logged.clear()
    router.zero_grad()
    router.local_tokens_per_expert.zero_()
    with replaying(microbatch):
        probs, routing_map = router(hidden)
    (probs.sum() * 0).backward()
    return {
        "losses": {
            name: (entry["values"] if isinstance(entry, dict) else entry.values).clone()
            for name, entry in logged_losses().items()
        },
        "counts": router.local_tokens_per_expert.clone(),
        "gradient": router.weight.grad.clone(),
        "map": routing_map,
    }


def expected_aux(router: Any, hidden: torch.Tensor, map_TE: torch.Tensor) -> float:
    """E / (K T^2) sum_e (tokens of e) (sum of its scores): Switch Transformer, equation 4."""
    with torch.no_grad():
        scores_TE = torch.sigmoid(hidden[:, 0] @ router.weight.t())
        scores_TE = scores_TE / scores_TE.sum(1, keepdim=True)
        tokens = len(map_TE)
        return float((map_TE.sum(0) * scores_TE.sum(0)).sum() * E / (K * tokens**2))


def one_hot(ids_TK: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(ids_TK), E, dtype=torch.bool).scatter(1, ids_TK.long(), True)


def load_by_policy(rank: int, aux_loss: str, expert_bias: str) -> dict[str, bool]:
    start()
    options = {"moe_router_replay_aux_loss": aux_loss, "moe_router_replay_expert_bias": expert_bias}
    router, hidden = router_of(**options)
    ids = drawn_routes()
    live = route(router, hidden, None)
    got = route(router, hidden, MicrobatchRoutes({1: ids}))
    want_aux = {"replayed": one_hot(ids), "live": live["map"]}
    want_bias = {"replayed": one_hot(ids).sum(0).float(), "live": live["counts"]}
    other = {"replayed": "live", "live": "replayed"}

    def aux_is(policy: str) -> bool:
        loss = expected_aux(router, hidden, want_aux[policy])
        return all(
            abs(got["losses"][name][0].item() - loss) < 1e-5
            for name in ("load_balancing_loss", "seq_load_balancing_loss")
        )

    return {
        "routes are replayed": torch.equal(got["map"], one_hot(ids)),
        "aux loss": aux_is(aux_loss),
        "aux loss tells the policies apart": not aux_is(other[aux_loss]),
        "expert bias": torch.equal(got["counts"], want_bias[expert_bias]),
        "expert bias tells the policies apart": not torch.equal(
            got["counts"], want_bias[other[expert_bias]]
        ),
        "z-loss is that of the live logits": torch.equal(
            got["losses"]["z_loss"], live["losses"]["z_loss"]
        ),
        "live again": torch.equal(live["gradient"], route(router, hidden, None)["gradient"]),
    }


@pytest.mark.parametrize("aux_loss", ["replayed", "live"])
@pytest.mark.parametrize("expert_bias", ["replayed", "live"])
def test_aux_loss_and_expert_bias_follow_the_load_that_was_asked_for(
    patched: TreeWorker, aux_loss: str, expert_bias: str
) -> None:
    (results,) = patched.run(load_by_policy, 1, aux_loss, expert_bias)
    assert all(results.values()), results


def z_loss_alone(rank: int) -> bool:
    start()
    off = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
    router, hidden = router_of(**off)
    live = route(router, hidden, None)
    got = route(router, hidden, MicrobatchRoutes({1: drawn_routes()}))
    return bool(live["gradient"].abs().max() > 0) and torch.equal(got["gradient"], live["gradient"])


def test_the_gradient_of_the_z_loss_is_the_live_one(patched: TreeWorker) -> None:
    assert patched.run(z_loss_alone, 1) == [True]


def padded_or_not(rank: int, masked: bool) -> dict[str, bool]:
    """The same tokens alone, and with padding behind them."""
    start()
    router, hidden = router_of()
    ids, padding = drawn_routes(), 17
    alone = route(router, hidden, MicrobatchRoutes({1: ids}))
    longer = torch.cat([hidden, torch.randn(padding, 1, H)])
    padded_ids = torch.cat([ids, spread_padding(padding, K, E).to(torch.uint8)])
    is_padding = torch.arange(T + padding) >= T
    given = {"padding_T": is_padding, "mean_tokens": float(T)} if masked else {}
    got = route(router, longer, MicrobatchRoutes({1: padded_ids}, **given))

    def close(a: torch.Tensor, b: torch.Tensor) -> bool:
        return torch.allclose(a, b, rtol=1e-5, atol=1e-6)

    return {
        "counts": torch.equal(got["counts"], alone["counts"]),
        "gradient": close(got["gradient"], alone["gradient"]),
        **{n: close(got["losses"][n], loss) for n, loss in alone["losses"].items()},
    }


def test_padding_is_not_part_of_the_load(patched: TreeWorker) -> None:
    (results,) = patched.run(padded_or_not, 1, True)
    assert {*results} >= {"load_balancing_loss", "seq_load_balancing_loss", "z_loss"}
    assert all(results.values()), results
    (control,) = patched.run(padded_or_not, 1, False)
    assert not any(control.values()), control


def of_another_rank(rank: int) -> list[torch.Tensor]:
    """Gradients of the auxiliary losses: the ranks' mean is not given, T, and 2 T tokens."""
    start()
    router, hidden = router_of(moe_z_loss_coeff=None)
    means = (None, float(T), 2.0 * T)
    given = [MicrobatchRoutes({1: drawn_routes()}, mean_tokens=mean) for mean in means]
    return [route(router, hidden, microbatch)["gradient"] for microbatch in given]


def test_the_auxiliary_losses_are_scaled_by_the_tokens_of_all_ranks(patched: TreeWorker) -> None:
    ((own, same, twice),) = patched.run(of_another_rank, 1)
    assert own.abs().max() > 0
    assert torch.equal(own, same)
    assert torch.equal(own * 2, twice)


def mask_of_the_model(rank: int, option: bool, masked: bool) -> dict[str, bool]:
    """The mask that a model gives its routers, of tokens that a live router and replay count."""
    start()
    router, hidden = router_of(moe_router_replay=option)
    padding = 17
    longer = torch.cat([hidden, torch.randn(padding, 1, H)])
    mask = (torch.arange(T + padding) >= T)[:, None] if masked else None
    routers: dict[str, MicrobatchRoutes | None] = {"live": None}
    if option:
        ids = torch.cat([drawn_routes(), spread_padding(padding, K, E).to(torch.uint8)])
        routers["replayed"] = MicrobatchRoutes({1: ids})
    same = {}
    for name, microbatch in routers.items():
        router.local_tokens_per_expert.zero_()
        with replaying(microbatch):
            _, routing_map = router(longer, mask)
        counts = router.local_tokens_per_expert
        same[name] = torch.equal(counts, routing_map[:T].sum(0).to(counts))
    return same


@pytest.mark.parametrize("option", [False, True])
def test_a_mask_of_the_model_keeps_padding_out_of_the_expert_bias(patched, option):
    names = ["live", "replayed"] if option else ["live"]
    (same,) = patched.run(mask_of_the_model, 1, option, True)
    assert same == dict.fromkeys(names, True)
    (control,) = patched.run(mask_of_the_model, 1, option, False)
    assert control == dict.fromkeys(names, False)
