"""Tries with bad input: the code must give the right result, or refuse with one clear line."""
