"""The image: its build, its tests, an engine for CI."""
