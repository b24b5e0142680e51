"""Training on rollouts: what is checked before an update, and what a checkpoint remembers."""
