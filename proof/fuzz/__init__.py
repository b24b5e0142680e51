"""Try bad input, thousands of times: the code must be right, or refuse it with one clear line."""
