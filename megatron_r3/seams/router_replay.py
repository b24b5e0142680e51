"""Temporary name, until the patches call the new one."""

from megatron_r3.seams.for_0_15 import RouterReplay, RouterReplayAction  # noqa: F401
