"""Applies the patches to a Megatron-LM tree and takes them back, with git underneath."""
