"""The only rooms that know Megatron: one file for each patch, with what its seam calls."""
