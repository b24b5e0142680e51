"""Temporary name, until the patches call the new one."""

from megatron_r3.seams.option import check_config  # noqa: F401
