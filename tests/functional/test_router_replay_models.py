"""RouterReplay's interface on models that upstream's class cannot take.

Shape suffixes (docs/glossary.md): E, T.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from router_targets import ASKED, FULL, clear, equal, targets, wanted_maps
from tiny import SEQUENCE, config, loss_and_gradients, start
from watch import maps_of

from megatron_r3 import local_routers
from proof.fidelity.rig.worker import TreeWorker


def mtp(rank: int) -> dict[str, Any]:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    import megatron_r3.frameworks.router_replay  # noqa: F401

    start()
    made = config(**ASKED, **FULL, mtp_num_layers=1)
    spec = get_gpt_decoder_block_spec(made, use_transformer_engine=False)
    gpt = GPTModel(
        made,
        spec,
        vocab_size=64,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(made, spec, use_transformer_engine=False),
    )
    seen = maps_of(gpt)
    decoder = local_routers(gpt)
    all_routers = [module for module in gpt.modules() if isinstance(module, TopKRouter)]
    RouterReplay.set_replay_data(targets())  # four: the MTP router is not in the list
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    loss_and_gradients(gpt, nullcontext())
    want = wanted_maps(targets())
    replayed = list(seen)
    # code that walks the modules of the model finds the MTP router too, and gives it targets
    mine: list[torch.Tensor] = []
    (extra,) = [router for router in all_routers if router not in decoder.values()]
    extra.register_forward_hook(lambda *given: mine.append(given[2][1]))
    before = loss_and_gradients(gpt, nullcontext())
    extra.router_replay.set_target_indices(targets()[0])
    extra.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    after = loss_and_gradients(gpt, nullcontext())
    late = decoder[4].router_replay
    late.has_routes = False  # what 0.16 does to an MTP router, after it was made
    return {
        "routers": len(all_routers),
        "wrong": sum(not torch.equal(want[layer - 1], map_TE) for layer, map_TE in replayed),
        "passes": len(replayed),
        "targets do nothing": equal(before, after) and torch.equal(mine[0], mine[-1]),
        "MTP takes them": sum(torch.equal(map_TE, want[0]) for map_TE in mine),
        "the list": len(RouterReplay.global_router_replay_instances),
    }


def test_mtp_routers_are_in_no_list_and_stay_live(patched: TreeWorker) -> None:
    (result,) = patched.run(mtp, 1)
    assert result == {
        "routers": 5,
        "wrong": 0,
        "passes": 8,
        "targets do nothing": True,
        "MTP takes them": 0,
        "the list": 3,
    }


def hybrid(rank: int) -> dict[str, Any]:
    """A hybrid model of attention, MLP and MoE layers: another class of block."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
    from megatron.core.transformer.spec_utils import import_module

    import megatron_r3.frameworks.router_replay  # noqa: F401

    start()
    pattern = "*E*-*E"
    made = HybridModel(
        config(**ASKED, **FULL, num_layers=len(pattern), is_hybrid_model=True),
        import_module(("megatron_r3.cpu.hybrid_spec", "spec")),
        vocab_size=64,
        max_sequence_length=SEQUENCE,
        hybrid_layer_pattern=pattern,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    seen, given = maps_of(made), targets(layers=2)
    RouterReplay.set_replay_data(given)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    loss_and_gradients(made, nullcontext())
    want = dict(zip((2, 6), wanted_maps(given), strict=True))
    clear()
    replayed = list(seen)
    seen.clear()
    loss_and_gradients(made, nullcontext())
    return {
        "passes": len(replayed),
        "wrong": sum(not torch.equal(want[layer], map_TE) for layer, map_TE in replayed),
        "live passes that fit": sum(torch.equal(want[layer], map_TE) for layer, map_TE in seen),
    }


def test_a_hybrid_model_replays(patched: TreeWorker) -> None:
    assert patched.run(hybrid, 1) == [{"passes": 4, "wrong": 0, "live passes that fit": 0}]
