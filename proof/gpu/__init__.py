"""The steps of `make gpu`, and the kit that brings them to a GPU machine without a network."""
