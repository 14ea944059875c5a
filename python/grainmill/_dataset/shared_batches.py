"""Batches as arrays in named shared memory, on request."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from grainmill._evaluate.batches.stack import shared_arena, stack
from grainmill._native import Arena
from grainmill._plan.spec import in_rows
from grainmill._tree import map_structure


class StackInSharedMemory:
    """The default batch function, except that the arrays are `SharedMemoryArray`s.

    A batch of one element, and arrays of Python objects, stay ordinary arrays; so does everything
    in a worker process, whose arena is memory that the main process reads in place.
    """

    def __call__(self, elements: list[Any]) -> Any:
        batch = stack(elements)
        if len(elements) == 1 or not isinstance(shared_arena(), Arena):
            return batch
        return map_structure(_shared, batch)

    def output_spec(self, spec: Any, *, batch_size: int, drop_remainder: bool) -> Any:
        """The spec of a batch of elements with `spec`."""
        return in_rows(batch_size if drop_remainder else None, spec, 0)


def _shared(array: Any) -> Any:
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        return array
    from grainmill.shared_memory_array import SharedMemoryArray  # noqa: PLC0415

    shared = SharedMemoryArray(array.shape, array.dtype)
    # In Grain the receiver removes the memory, so it is left behind if nobody receives it.
    shared.unlink_on_del()
    np.copyto(shared, array)
    return shared


class SharedMemoryOutput:
    """What datasets of batches have besides the methods of others."""

    _node: Any
    _program: Any = None
    """What was compiled of the node, where elements are computed by index."""

    def enable_shared_memory_output(self) -> None:
        """Makes later batches arrays in named shared memory (`multiprocessing.SharedMemoryArray`).

        Their values and dtypes stay the same. Such arrays are sent to other processes by name; the
        memory is removed from the system with the last array over it in the process that computed
        it. Batches of one element, and arrays of Python objects, are ordinary arrays. Datasets
        that were derived from this one before are not affected. Worker processes need no such call:
        their batches are written to memory that the main process reads in place.

        If the dataset has a `batch_fn`, the method of that name of the `batch_fn` is called, if it
        has one.

        Example:
            >>> ds = grain.MapDataset.range(4).batch(2)
            >>> ds.enable_shared_memory_output()
            >>> type(ds[1]).__name__, ds[1].tolist()
            ('SharedMemoryArray', [2, 3])
        """
        batch_fn = self._node.batch_fn
        if batch_fn is None:
            self._node = dataclasses.replace(self._node, batch_fn=StackInSharedMemory())
            self._program = None
        elif hasattr(batch_fn, "enable_shared_memory_output"):
            batch_fn.enable_shared_memory_output()
