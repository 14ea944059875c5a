"""Datasets, which hold a plan and append nodes to it, and iterators, which run it."""
