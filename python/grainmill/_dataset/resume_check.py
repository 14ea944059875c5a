"""A check that pipelines with user-defined stages resume exactly."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from grainmill import _tree as tree


def assert_equal_output_after_checkpoint(ds: Any) -> None:
    """Saves and restores an iterator of `ds` before every element and compares what follows.

    Meant for tests of your own stages: time and memory grow with the square of the number of
    elements.

    Args:
        ds: A dataset with few elements that can be iterated over repeatedly.

    Raises:
        AssertionError: An element or a state differs after restoring, the structure of states
            changes, or the dataset is empty.

    Example:
        >>> ds = grain.MapDataset.range(6).shuffle(seed=0).to_iter_dataset().batch(4)
        >>> grain.experimental.assert_equal_output_after_checkpoint(ds)
    """
    iterator = iter(ds)
    states, elements = [iterator.get_state()], []
    for element in iterator:
        elements.append(copy.deepcopy(element))
        states.append(iterator.get_state())
    assert elements, "the dataset has no elements to compare"
    for done, state in enumerate(states):
        _assert_same_spec(states[0], state)
        restored = iter(ds)
        restored.set_state(copy.deepcopy(state))
        _assert_equal(restored.get_state(), state, f"state after {done} elements")
        rest = list(restored)
        assert len(rest) == len(elements) - done, (
            f"expected {len(elements) - done} elements after restoring the state after {done}, got "
            f"{len(rest)}"
        )
        for number, element in enumerate(rest, start=done):
            _assert_equal(element, elements[number], f"element {number} restored after {done}")


def _assert_equal(actual: Any, expected: Any, what: str) -> None:
    actual_leaves, actual_tree = tree.flatten(actual)
    leaves, expected_tree = tree.flatten(expected)
    assert actual_tree == expected_tree, f"{what}: expected {expected_tree}, got {actual_tree}"
    for found, leaf in zip(actual_leaves, leaves, strict=True):
        strict = isinstance(leaf, np.ndarray)
        np.testing.assert_array_equal(found, leaf, err_msg=what, strict=strict)


def _assert_same_spec(first: Any, state: Any) -> None:
    kinds = [
        [(type(leaf), np.shape(leaf)) for leaf in tree.flatten(one)[0]] for one in (first, state)
    ]
    assert kinds[0] == kinds[1], f"the structure of the state changed from {first} to {state}"
