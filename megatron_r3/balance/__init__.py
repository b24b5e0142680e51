"""How evenly the experts' tokens load the ranks, and what evens them out."""
