"""Does the mismatch matter? The loop under several mismatches, with and without R3."""
