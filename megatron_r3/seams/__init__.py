"""What the patches of Megatron-LM call; each file names its patch (docs/how-it-works.md)."""
