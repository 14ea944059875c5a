"""Stores of computed elements, in memory and in files, and what tells their pipelines apart."""
