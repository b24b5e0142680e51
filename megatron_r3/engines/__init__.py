"""What rollout engines return, decoded into checked samples."""
