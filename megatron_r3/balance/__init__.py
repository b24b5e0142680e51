"""How unevenly experts load the ranks, and guests: copies of experts that even the load out."""
