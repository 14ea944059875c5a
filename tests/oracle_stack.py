"""A slow reference implementation of stacking: `numpy.stack`, leaf by leaf."""

import jax
import numpy as np


def stacked(elements):
    """A batch of `elements`, as Grain's default batch function returns it."""
    if len(elements) == 1:
        return jax.tree_util.tree_map(lambda leaf: np.expand_dims(leaf, 0), elements[0])
    return jax.tree_util.tree_map(lambda *leaves: np.stack(leaves), *elements)


def padded(elements, batch_size, pad_value):
    """A batch of `elements`, filled up with rows of `pad_value`."""
    missing = batch_size - len(elements)

    def with_padding(leaf):
        row = np.full(leaf.shape[1:], pad_value, leaf.dtype)
        return np.concatenate([leaf, *[row[None]] * missing]) if missing else leaf

    return jax.tree_util.tree_map(with_padding, stacked(elements))


def assert_same(found, expected):
    """Asserts equal structures, dtypes, shapes and bytes of values (padding bytes may differ)."""
    assert jax.tree_util.tree_structure(found) == jax.tree_util.tree_structure(expected)
    pairs = zip(jax.tree_util.tree_leaves(found), jax.tree_util.tree_leaves(expected), strict=True)
    for ours, theirs in pairs:
        assert type(ours) is np.ndarray
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert ours.flags.writeable
        if ours.dtype.hasobject or ours.dtype.names or ours.dtype.char in "gG":
            assert repr(ours.tolist()) == repr(theirs.tolist())
        else:
            assert ours.tobytes() == theirs.tobytes()
