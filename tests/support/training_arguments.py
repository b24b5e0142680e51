"""Megatron's validated arguments for a training on rollouts, as far as we read them."""

from __future__ import annotations

from types import SimpleNamespace

from megatron_r3.train.option_table import OPTIONS
from megatron_r3.train.options import RolloutOptions

ARGUMENTS: dict[str, object] = {
    **{option.name: option.default if option.field else None for option in OPTIONS},
    "rollouts": ["a", "b"],
    "moe_router_replay": True,
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


def options_of(**changes: object) -> RolloutOptions:
    """The options that these arguments give, with some of them changed."""
    return RolloutOptions.from_args(SimpleNamespace(**{**ARGUMENTS, **changes}))


def update_options_of(**changes: object) -> RolloutOptions:
    """As `options_of`; a change must be of an argument that the policy update reads."""
    known = {*ARGUMENTS, "rampup_batch_size", "decrease_batch_size_if_needed", MXFP8}
    known |= {"fp8_param_gather", "moe_input_jitter_eps", "qk_clip"}
    assert changes.keys() <= known
    return options_of(**changes)
