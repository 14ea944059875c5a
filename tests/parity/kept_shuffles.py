"""Grain's shuffle of few indices takes up to 5 ms for each one: here it is computed once."""

import functools

import pytest
from grain._src.python.dataset.transformations import shuffle


@pytest.fixture(scope="module", autouse=True)
def _shuffles_are_kept():
    """A module that imports this reads the same places of the same pipelines again and again."""
    kept = functools.lru_cache(1 << 16)(shuffle.index_shuffle.index_shuffle)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle.index_shuffle, "index_shuffle", kept)
        yield
