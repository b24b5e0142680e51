"""R3 itself: the active micro-batch, its routes, the dispatch plan, the replayed gate."""
