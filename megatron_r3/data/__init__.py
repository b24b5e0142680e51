"""Rollouts as data: what one is, its store on disk, and what the engines return."""
