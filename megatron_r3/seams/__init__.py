"""The other halves of the patches, in files that are named like them; nothing else is here.

The two patches of the dispatch plan share a file. `for_0_15.py` serves 0.15 and 0.16 alone.
"""
