"""The kit for a GPU machine without a network: how it is built, and the steps that run there."""
