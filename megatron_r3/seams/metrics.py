"""Temporary name, until the patches call the new one."""

from megatron_r3.seams.pretrain import log_step as report  # noqa: F401
