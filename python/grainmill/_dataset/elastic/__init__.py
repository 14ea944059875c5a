"""Iteration that another number of processes can continue."""
