"""Temporary name, until the patches call the new one."""

from megatron_r3.training.metrics import report  # noqa: F401
