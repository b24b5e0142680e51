"""Feed the code bad input, thousands of times: it must be right, or refuse with one clear line."""
