"""Rollouts from an engine's responses to a store, and what the store then holds."""
