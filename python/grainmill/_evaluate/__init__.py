"""A plan over a block of positions: how its elements are computed, nested and stacked."""
