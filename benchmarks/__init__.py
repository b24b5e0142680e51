"""What is measured, not tested: ratios, side by side in one run."""
