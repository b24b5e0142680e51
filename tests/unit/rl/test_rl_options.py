"""What the RL loop refuses with replay, what its options mean, and the store that it writes.

Shape suffixes (docs/glossary.md): N, T.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loop_turns import SHAPE, read, rollout
from training_arguments import ARGUMENTS

from megatron_r3.data.store import RolloutStore
from megatron_r3.rl import rl_options
from megatron_r3.rl.rl_loop import write_collection
from megatron_r3.rl.rl_options import LoopOptions, refuse_in_loop
from megatron_r3.rl.turns import TurnRoutes
from megatron_r3.seams.arguments import check_args

LOOP: dict[str, Any] = {
    "rollouts": None,
    "perform_rl_step": True,
    "rl_write_rollouts": None,
    "rl_default_temperature": 0.7,
    "rl_default_top_p": 0,
    "rl_default_top_k": -1,
    "inference_max_seq_length": 64,
    "grpo_group_size": 4,
    "grpo_prompts_per_step": 2,
    "padded_vocab_size": 64,
    "inference_dynamic_batching_async_sched_mode": "legacy",
}
UNGIVEN = {name: None for name in ARGUMENTS if name.startswith("rollouts")}


def arguments(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**ARGUMENTS, **LOOP, **changes})


@pytest.fixture
def patched_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rl_options, "_is_patched", lambda: True)


@pytest.mark.usefixtures("patched_loop")
def test_one_option_has_the_engine_record() -> None:
    args = arguments()
    refuse_in_loop(args)
    assert args.moe_enable_routing_replay


@pytest.mark.usefixtures("patched_loop")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rl_training_cuda_graphs": True}, "--rl-training-cuda-graphs captures the router"),
        ({"virtual_pipeline_model_parallel_size": 2}, "leave out virtual pipeline stages"),
        ({"context_parallel_size": 2}, "set --context-parallel-size 1"),
        ({"inference_dynamic_batching_async_sched_mode": "async"}, "no routes; set it to legacy"),
        ({"rl_durable_rollout_bank": True}, "--rl-durable-rollout-bank writes rollouts without"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers; leave it out"),
        ({"moe_router_replay_guest_slots": 1}, "leave out --moe-router-replay-guest-slots"),
        ({"use_megatron_fsdp": True}, "leave FSDP out"),
        ({"moe_router_replay_source": "live"}, "--moe-router-replay-source is for the rollouts of"),
        ({"moe_router_replay_max_lag": 0}, "--moe-router-replay-max-lag is for the rollouts of"),
        ({"rollouts_epochs": 2}, "--rollouts-epochs is for the rollouts of a store"),
    ],
)
def test_what_is_refused_with_its_reason(change: dict[str, Any], words: str) -> None:
    args = arguments(**change)
    with pytest.raises(ValueError, match=words) as error:
        refuse_in_loop(args)
    assert str(error.value).startswith("--perform-rl-step with --moe-router-replay: ")
    assert not hasattr(args, "moe_enable_routing_replay")


@pytest.mark.parametrize(
    "change",
    [{"moe_router_replay": False}, {"moe_router_replay": False, "perform_rl_step": False}],
    ids=["no replay", "no loop"],
)
def test_a_store_of_the_loop_needs_the_loop_and_replay(change, capsys):
    check_args(arguments(**UNGIVEN, **change))
    with pytest.raises(SystemExit):
        check_args(arguments(**UNGIVEN, **change, rl_write_rollouts="store"))
    assert capsys.readouterr().err.startswith("error: --rl-write-rollouts store needs --")


def test_intervals() -> None:
    every = LoopOptions.from_args(arguments())
    assert [n for n in range(20) if every.measures(n)] == [4, 9, 14, 19]
    rare = LoopOptions.from_args(arguments(moe_router_replay_log_mismatch_interval=10))
    assert [n for n in range(20) if rare.measures(n)] == [9, 19]
    never = LoopOptions.from_args(arguments(moe_router_replay_log_mismatch_interval=0))
    assert not any(never.measures(n) for n in range(20))


def test_a_collection_becomes_a_shard(tmp_path: Path) -> None:
    options = LoopOptions.from_args(arguments(num_layers=3, rl_write_rollouts=str(tmp_path)))
    turns = read(rollout(4, 5), rollout(3, routes=[None]))
    write_collection(options, TurnRoutes(SHAPE, turns), "0.19.0")
    store = RolloutStore([tmp_path])
    assert len(store) == 3
    sampling = store.info.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 1.0, 0)
    assert sampling.logprobs_of == "raw"
    assert [store.rollout(n).routes.recorded_T.all() for n in range(3)] == [True, True, False]
    assert store.rollout(1).tokens_N.tolist() == [10, 11, 12, 13, 14]


def test_a_wrong_turn_is_named(tmp_path: Path) -> None:
    options = LoopOptions.from_args(arguments(num_layers=3, rl_write_rollouts=str(tmp_path)))
    turns = read(rollout(4), rollout(3, reward=float("nan")))
    with pytest.raises(ValueError, match=r"^rollout 1 .*turn 0: reward"):
        write_collection(options, TurnRoutes(SHAPE, turns), "0.19.0")
    assert not [*tmp_path.glob("shard-*")]
