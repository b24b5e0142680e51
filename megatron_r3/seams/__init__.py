"""What the patches of Megatron-LM call; each docstring names the patch (docs/how-it-works.md)."""
