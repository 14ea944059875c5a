"""Transforms that turn records into values: in the engine, or a whole block at a time."""
