"""The demo: a tiny MoE is trained, sampled by a real engine, and trained on its rollouts."""
