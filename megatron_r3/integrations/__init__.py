"""What frameworks import: upstream's RouterReplay on the active microbatch, and verl."""
