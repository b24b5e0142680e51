"""Placeholder until the merge: the check of the arguments is written elsewhere."""

from megatron_r3.seams.pretrain import check_args as check_args
