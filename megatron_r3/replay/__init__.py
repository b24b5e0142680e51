"""R3 itself: the active micro-batch, its routes, what a rank has, and the dispatch plan."""
