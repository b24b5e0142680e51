"""What the keepers of the patches use: not part of the package that is installed."""
