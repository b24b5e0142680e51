"""The policy update as formulas: losses, corrections, averages, advantages, agreement."""
