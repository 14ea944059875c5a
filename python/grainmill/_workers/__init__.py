"""A pool of worker processes that run user functions."""
