"""Training on rollouts: options, samples, losses, the step and its checks, metrics, resume."""
