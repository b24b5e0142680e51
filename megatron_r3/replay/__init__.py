"""R3 itself: the active micro-batch, its routes, a rank's layers and tokens, the dispatch plan."""
