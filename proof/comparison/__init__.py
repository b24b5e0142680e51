"""The comparison: the loop with and without R3, under several mismatches of the sampler."""
