"""Megatron's validated arguments for a training on rollouts, as far as we read them."""

from __future__ import annotations

from types import SimpleNamespace

from megatron_r3.training.options import RolloutOptions

ARGUMENTS: dict[str, object] = {
    "rollouts": ["a", "b"],
    "rollouts_policy": None,
    "rollouts_sampling": None,
    "rollouts_follow": None,
    "rollouts_check": None,
    "rollouts_max_lag": None,
    "rollouts_pack": None,
    "rollouts_clip_eps": None,
    "rollouts_clip_eps_high": None,
    "rollouts_dual_clip": None,
    "rollouts_old_policy": None,
    "rollouts_mini_steps": None,
    "rollouts_epochs": None,
    "rollouts_shuffle": None,
    "rollouts_loss": None,
    "rollouts_loss_module": None,
    "rollouts_aggregation": None,
    "rollouts_fixed_length": None,
    "rollouts_advantages": None,
    "rollouts_correction": None,
    "rollouts_correction_level": None,
    "rollouts_correction_bounds": None,
    "rollouts_log": None,
    "rollouts_publish": None,
    "rollouts_publish_interval": None,
    "rollouts_publish_like": None,
    "rollouts_publish_keep": None,
    "moe_router_replay": True,
    "moe_router_replay_source": None,
    "moe_router_replay_stale_source": None,
    "moe_router_replay_max_lag": None,
    "moe_router_replay_missing": "live",
    "moe_router_replay_dispatch_plan": True,
    "moe_router_replay_verify_plan": False,
    "moe_router_replay_verify_dispatch": False,
    "moe_router_replay_log_mismatch_interval": None,
    "moe_token_dispatcher_type": "alltoall",
    "moe_layer_freq": 1,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "mtp_num_layers": None,
    "mtp_loss_scaling_factor": 0.1,
    "save": None,
    "load": None,
    "moe_router_topk": 2,
    "num_experts": 8,
    "num_layers": 4,
    "log_interval": 5,
    "vocab_size": 63,
    "padded_vocab_size": None,
    "seq_length": 64,
    "micro_batch_size": 4,
    "global_batch_size": 8,
    "train_samples": None,
    "train_iters": 4,
    "data_parallel_size": 1,
    "tensor_model_parallel_size": 2,
    "context_parallel_size": 1,
    "sequence_parallel": True,
    "calculate_per_token_loss": False,
    "check_for_nan_in_loss_and_grad": True,
    "dataloader_type": "single",
}

# of the trainer's model that is the sampler's, INFO of `stored.py`
MODEL: dict[str, object] = {
    "moe_router_topk": 4,
    "num_experts": 16,
    "num_layers": 6,
    "moe_layer_freq": [0, 1, 1, 0, 0, 1],
}
TRAINER: dict[str, object] = {"rollouts_old_policy": "trainer"}
TOKENS: dict[str, object] = {"calculate_per_token_loss": True}
MXFP8 = "reuse_grad_buf_for_mxfp8_param_ag"


def update_options_of(**changes: object) -> RolloutOptions:
    """The options that these arguments give, with some of them changed."""
    known = {*ARGUMENTS, "rampup_batch_size", "decrease_batch_size_if_needed", MXFP8}
    ours = ("guest_slots", "guest_domain", "guest_tokens", "aux_loss", "expert_bias", "fused_gate")
    known |= {f"moe_router_replay_{name}" for name in ours}
    assert changes.keys() <= known
    return RolloutOptions.from_args(SimpleNamespace(**{**ARGUMENTS, **changes}))
