"""What the patches call, one file for each patch and named like it; nothing else is here."""
