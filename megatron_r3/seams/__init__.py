"""What the patches call, in files that are named like the patches; nothing else is here."""
