"""Measurements, not tests: ratios of ways that run side by side."""
