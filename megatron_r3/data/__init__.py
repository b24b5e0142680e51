"""Rollouts: their record, the store on disk, decoders of engines' responses, the truth test."""
