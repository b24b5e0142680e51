"""Rollouts from an engine to a store (collect, convert), and what stores hold (inspect, verify)."""
