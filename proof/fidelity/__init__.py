"""The proof: every parallel layout and schedule replays exactly what a rollout recorded."""
