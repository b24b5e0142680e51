"""Guest experts: copies of hot experts on other ranks, for one layer of one micro-batch."""
