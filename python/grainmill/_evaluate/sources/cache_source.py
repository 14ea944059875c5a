"""Elements of another plan, computed once and then taken from a store."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from grainmill._cache.encoding import MISSING
from grainmill._evaluate.evaluated import Evaluated
from grainmill._evaluate.program import PendingElements
from grainmill._evaluate.sources.element_sources import ElementSource
from grainmill._interrupts import raise_interrupt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grainmill._cache.make import ElementStore
    from grainmill._evaluate.program import Program
    from grainmill._evaluate.sources.element_sources import Indices
    from grainmill._native import ReadQueue
    from grainmill._plan import random_access as plan

# The number of an element, and what computing or storing it raised.
_Failure: TypeAlias = "tuple[int, BaseException]"


class _CacheReads(NamedTuple):
    """Elements that are being read.

    Attributes:
        missing: Those that are not stored, each once.
        computed: What computes these.
        stored: The reads of the others; `None` if none were started.
    """

    missing: Indices
    computed: PendingElements
    stored: Any

    def wait(self) -> None:
        """See `PendingRequest.wait`."""
        self.computed.wait()
        if self.stored is not None:
            self.stored.wait()


class CacheSource(ElementSource["Indices"]):
    """The elements of the first epoch of another plan, in every epoch."""

    def __init__(self, node: plan.Cache, parent: Program, reads: ReadQueue) -> None:
        self._reads = reads
        self._length = node.length
        self._store: ElementStore = node.store
        self._parent = parent
        # The elements that a thread is computing, with a lock that it holds until they are stored.
        self._claims: dict[int, threading.Lock] = {}
        self._lock = threading.Lock()
        self._process = os.getpid()
        self.mean_byte_len = parent.mean_byte_len
        self.num_records = parent.num_records
        self.reads_lists = parent.reads_lists

    @property
    def waits_for_storage(self) -> bool:
        """See `ElementSource.waits_for_storage`; the parent's, until all elements are stored."""
        if self._store.is_slow:
            return True
        return not self._store.is_complete and self._parent.waits_for_storage

    def request(self, index: Indices, datasets: Any) -> Indices:
        """See `ElementSource.request`; the indices in the first epoch."""
        if not self._length:
            raise IndexError("`cache` of an empty dataset has no elements")
        return (index % self._length).astype(np.int64, copy=False)  # it may be beyond 64 bits

    def started(self, request: Indices) -> _CacheReads:
        """See `ElementSource.started`; starts the reads of stored and of missing elements."""
        missing = request[self._store.missing(request)]
        if len(missing) > 1:  # each once, in the order of the request
            missing = missing[np.sort(np.unique(missing, return_index=True)[1])]
        computed = PendingElements(self._parent, missing)
        if len(missing) and self._parent.waits_for_storage:
            computed.start()
        stored = self._store.start_read(request, self._reads) if self._store.is_slow else None
        return _CacheReads(missing, computed, stored)

    def num_reads(self, request: Indices, reads: _CacheReads) -> int:
        """See `ElementSource.num_reads`."""
        num_stored = 0 if reads.stored is None else len(request) - len(reads.missing)
        return reads.computed.num_reads + num_stored

    def read(self, request: Indices, reads: _CacheReads | None = None) -> Evaluated:
        """See `ElementSource.read`."""
        missing, pending, stored = self.started(request) if reads is None else reads
        if not len(missing):
            return self._stored(request, {}, None, stored)
        if pending.requests is not None:
            return self._stored(request, *self._computed(missing, pending), stored)
        with self._claimed(missing.tolist()) as (mine, others):
            absent = np.array(mine, np.int64)
            absent = absent[self._store.missing(absent)]
            pending = PendingElements(self._parent, absent)
            computed, failure = self._computed(absent, pending) if len(absent) else ({}, None)
        for claim in others:  # only now, when nobody waits for this thread
            with claim:  # an interrupt does not leave it held
                pass
        return self._stored(request, computed, failure, None)

    @contextlib.contextmanager
    def _claimed(self, missing: list[int]) -> Iterator[tuple[list[int], list[Any]]]:
        """Those of the elements that this thread computes, and the claims of threads on others."""
        if self._process != os.getpid():  # a forked child has none of those threads
            self._process, self._claims, self._lock = os.getpid(), {}, threading.Lock()
        claim, mine, others = threading.Lock(), [], []
        claim.acquire()
        try:
            with self._lock:
                for number in missing:
                    other = self._claims.setdefault(number, claim)
                    if other is claim:
                        mine.append(number)
                    elif other not in others:
                        others.append(other)
            yield mine, others
        finally:
            with self._lock:
                for number in mine:
                    del self._claims[number]
            claim.release()

    def _computed(
        self, missing: Indices, pending: PendingElements
    ) -> tuple[dict[int, Any], _Failure | None]:
        """Computes and stores elements, up to one that fails."""
        result = pending()
        numbers, elements, failure = missing.tolist(), result.elements, result.failure
        try:
            self._store.put(numbers[: len(elements)], elements)
        except Exception as refused:  # one of them cannot be stored
            raise_interrupt(refused)
            for at, element in enumerate(elements):
                try:
                    self._store.put([numbers[at]], [element])
                except Exception as refusal:
                    raise_interrupt(refusal)
                    elements, failure = elements[:at], refusal
                    break
        failed = None if failure is None else (numbers[len(elements)], failure)
        return dict(zip(numbers, elements, strict=False)), failed

    def _stored(
        self, index: Indices, computed: dict[int, Any], failed: _Failure | None, pending: Any
    ) -> Evaluated:
        """The elements at `index`, up to one that failed; `pending` is of `start_read`."""
        elements: list[Any] = []
        if len(computed) == len(index):  # each index occurs once
            return Evaluated([computed[number] for number in index.tolist()], None)
        try:
            stored = self._store.read(index, pending)
            for number, element in zip(index.tolist(), stored, strict=True):
                if number in computed:
                    # Elements at the same index must not share memory.
                    elements.append(computed.pop(number))
                elif element is not MISSING:
                    elements.append(element)
                elif failed is not None and number == failed[0]:
                    return Evaluated(elements, failed[1])
                else:
                    again = self._parent.run_at(np.array([number], np.int64))
                    if again.failure is not None:
                        return Evaluated(elements, again.failure)
                    elements += again.elements
        except Exception as unreadable:
            raise_interrupt(unreadable)
            return Evaluated(elements, unreadable)
        return Evaluated(elements, None)
