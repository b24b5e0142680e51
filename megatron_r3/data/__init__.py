"""Rollouts: the `Rollout` record, the store on disk, decoders of responses, the truth test."""
