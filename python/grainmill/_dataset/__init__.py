"""The face of a plan: datasets hold a node and append one, iterators run it."""
