"""Elements of another plan, computed once and then taken from a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from grainmill._cache.missing import MISSING
from grainmill._evaluate.element_sources import ElementSource
from grainmill._evaluate.fuse import Evaluated

if TYPE_CHECKING:
    from grainmill._evaluate.element_sources import Indices
    from grainmill._evaluate.evaluator import Evaluator, PendingElements
    from grainmill._plan import random_access as plan


class CacheSource(ElementSource["Indices"]):
    """The elements of the first epoch of another plan, in every epoch."""

    def __init__(self, node: plan.Cache, parent: Evaluator) -> None:
        self._length = node.length
        self._store = node.store
        self._parent = parent
        self.mean_byte_len = parent.mean_byte_len
        self.num_records = parent.num_records
        self.reads_lists = parent.reads_lists

    @property
    def waits_for_storage(self) -> bool:
        """See `ElementSource.waits_for_storage`; not once all elements are stored."""
        return self._parent.waits_for_storage and not self._store.is_complete

    def request(self, index: Indices, datasets: Any) -> Indices:
        """See `ElementSource.request`; the indices in the first epoch."""
        if not self._length:
            raise IndexError("`cache` of an empty dataset has no elements")
        return index % self._length

    def start(self, request: Indices) -> tuple[Indices, Indices, PendingElements | None]:
        """See `ElementSource.start`; starts the reads of elements that have to be computed."""
        missing = request[self._store.missing(request)]
        if len(missing) > 1:  # each once, in the order of the request
            missing = missing[np.sort(np.unique(missing, return_index=True)[1])]
        pending = None
        if len(missing) and self._parent.waits_for_storage:
            pending = self._parent.start_reads_at(missing)
        return request, missing, pending

    def wait(self, pending: Any) -> Any:
        """See `ElementSource.wait`."""
        if pending[2] is not None:
            pending[2].wait()
        return pending

    def finish(self, pending: tuple[Indices, Indices, PendingElements | None]) -> Evaluated:
        """See `ElementSource.finish`."""
        index, missing, reads = pending
        if not len(missing):
            return self._stored(index, {}, None)
        computed = self._parent.run_at(missing) if reads is None else reads()
        numbers, failure = missing.tolist(), computed.failure
        try:
            self._store.put(numbers[: len(computed.elements)], computed.elements)
        except Exception:  # one of them cannot be stored
            for at, element in enumerate(computed.elements):
                try:
                    self._store.put([numbers[at]], [element])
                except Exception as refusal:
                    return self._stored(
                        index, dict(zip(numbers[:at], computed.elements, strict=False)), refusal
                    )
        known = dict(zip(numbers, computed.elements, strict=False))
        if len(numbers) == len(index) and failure is None and numbers == index.tolist():
            return Evaluated(computed.elements, None)
        return self._stored(index, known, failure)

    def _stored(
        self, index: Indices, computed: dict[int, Any], failure: BaseException | None
    ) -> Evaluated:
        """The elements at `index`, up to one that is neither stored nor computed."""
        elements: list[Any] = []
        try:
            stored = self._store.read(index)
            for number, element in zip(index.tolist(), stored, strict=True):
                if number in computed:
                    # Elements at the same index must not share memory.
                    elements.append(computed.pop(number))
                elif element is not MISSING:
                    elements.append(element)
                elif failure is not None:
                    return Evaluated(elements, failure)
                else:
                    again = self._parent.run_at(np.array([number], np.int64))
                    if again.failure is not None:
                        return Evaluated(elements, again.failure)
                    elements += again.elements
        except Exception as unreadable:
            return Evaluated(elements, unreadable)
        return Evaluated(elements, None)
