"""Code of RL frameworks, run unchanged: tests and benchmarks run it on CPU tensors."""
