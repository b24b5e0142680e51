"""Temporary name, until the patches call the new one."""

from megatron_r3.seams.pretrain import check_args, check_step, use_rollouts  # noqa: F401
