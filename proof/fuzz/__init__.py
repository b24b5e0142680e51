"""Bad input, thousands of times: each try is right, or refused with one clear line."""
