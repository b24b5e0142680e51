"""The other halves of the patches, in files that are named like them; nothing else is here."""
