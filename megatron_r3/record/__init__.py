"""A server between an agent and an engine that records each session as rollouts with routes."""
