"""Where the elements of a chain come from: files, users' objects, numbers, other sources."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeAlias, TypeVar

from grainmill._evaluate.evaluated import Evaluated, evaluated
from grainmill._evaluate.fused import Step
from grainmill._evaluate.prefetch import tuning
from grainmill._interrupts import listed, raise_interrupt
from grainmill._native import fill_columns

if TYPE_CHECKING:
    import numpy as np

    from grainmill._native import PendingRead, ReadQueue, RecordFiles
    from grainmill._plan.node import MapNode

Indices: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"
DatasetNumbers: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint32]]"

# The elements to read: their indices, with the numbers of their datasets if there are several.
Request = TypeVar("Request")


class PendingRequest:
    """What was requested of a source; its reads may be started before it is computed."""

    __slots__ = ("_has_waited", "_reads", "_request", "_source")

    def __init__(self, source: ElementSource[Any], request: Any) -> None:
        self._source = source
        self._request = request
        self._reads: Any = None
        self._has_waited = False

    def start(self) -> Self:
        """Starts the reads that need no interpreter lock, where storage is slow."""
        self._reads = self._source.start(self._request)
        return self

    def start_beyond(self) -> Any:
        """See `ElementSource.start_beyond`."""
        source = self._source
        return source.start_beyond(self._request) if source.reads_beyond else None

    @property
    def num_reads(self) -> int:
        """How many reads of slow storage were started, if the source does not limit them."""
        return 0 if self._reads is None else self._source.num_reads(self._request, self._reads)

    def wait(self) -> None:
        """Waits for the reads; may be called again, also after an interrupt.

        Afterwards, what was read can be used more than once.
        """
        if self._reads is not None and not self._has_waited:
            self._reads.wait()
            self._has_waited = True

    def __call__(self) -> Evaluated:
        """Computes the elements, once, on any thread."""
        return self._source.read(self._request, self._reads)


class ElementSource(abc.ABC, Generic[Request]):
    """The source of one chain.

    Attributes:
        runs_user_code: Whether the elements are computed by Python code of the user.
        mean_byte_len: Mean bytes of an element, 0 if unknown.
        num_records: Records per element.
        reads_lists: Whether a user's `__getitems__` is called with one list for all elements
            that are requested at once.
        reads_beyond: Whether its reads serve many elements each, so that blocks start too few:
            then `start_beyond` starts some.
    """

    runs_user_code = True
    reads_beyond = False
    mean_byte_len = 0.0
    num_records = 1
    reads_lists = False

    @property
    def waits_for_storage(self) -> bool:
        """Whether its storage, or one upstream, is slow, by its recent reads."""
        return any(source.waits_for_storage for source in self.may_be_slow)

    @property
    def may_be_slow(self) -> Sequence[ElementSource[Any]]:
        """Of this source and those upstream the ones whose storage may be slow, once each.

        Many stages may read one, so that asking all parents would take time by the number of ways.
        """
        has_own = type(self).waits_for_storage is not ElementSource.waits_for_storage
        return [self] if has_own else []

    @property
    def has_room(self) -> bool:
        """Whether there is memory to start further reads on slow storage."""
        return True

    def request(self, index: Indices, datasets: DatasetNumbers | None) -> Any:
        """The argument of `start` and `read` for the indices and dataset numbers of a column."""
        return index

    def start(self, request: Request) -> Any:
        """Starts the reads that need no interpreter lock.

        Returns:
            What has `wait` and is passed to `read`; `None` if `read` does everything.
        """
        try:
            return self.started(request)
        except Exception as failure:
            raise_interrupt(failure)
            return None  # `read` finds the failing element

    def started(self, request: Request) -> Any:
        """What `start` returns, where storage is slow."""
        return None

    def num_reads(self, request: Request, reads: Any) -> int:
        """See `PendingRequest`; of `reads`, which `started` returned."""
        return 0

    def start_beyond(self, request: Request) -> Any:
        """Starts reads that help to read these elements later, if there is memory for them.

        Returns:
            What must be held until the reads of the elements are started; `None` if none were.
        """
        return None

    @abc.abstractmethod
    def read(self, request: Request, reads: Any = None) -> Evaluated:
        """The elements, up to the first that fails.

        Args:
            request: What `request` returned.
            reads: What `start` returned for it.
        """

    def fill_function(self) -> Callable[..., tuple[int, Evaluated | None]] | None:
        """The engine's `fill_columns` with its first argument bound, if it can read these files."""
        return None

    def first_step(self) -> Step | None:
        """A step that reads one element, if the loop of functions should read."""
        return None


SourceT = TypeVar("SourceT", bound="type[ElementSource[Any]]")


def computes(node_type: type[MapNode]) -> Callable[[SourceT], SourceT]:
    """Makes a class of sources the `computed_by` of nodes of this type."""

    def register(source_type: SourceT) -> SourceT:
        node_type.computed_by = source_type
        return source_type

    return register


class RangeSource(ElementSource[Indices]):
    """The numbers of ranges, which the engine computes."""

    runs_user_code = False

    def read(self, request: Indices, reads: Any = None) -> Evaluated:
        """See `ElementSource.read`."""
        return Evaluated(request.tolist(), None)


class BigRangeSource(ElementSource[Indices]):
    """The numbers of a `range` that do not fit in 64 bits."""

    runs_user_code = False

    def __init__(self, numbers: range) -> None:
        self._numbers = numbers

    def read(self, request: Indices, reads: Any = None) -> Evaluated:
        """See `ElementSource.read`."""
        return Evaluated(list(map(self._numbers.__getitem__, request.tolist())), None)


class _FileReads:
    """Records that are being read; those that were are kept."""

    def __init__(self, finish: Callable[[], Evaluated], num_reads: int) -> None:
        self.num_reads = num_reads
        self._finish = finish
        self._records: Evaluated | None = None

    def wait(self) -> None:
        """Waits for the records."""
        self.records()

    def records(self) -> Evaluated:
        """The records, up to the first that could not be read."""
        if self._records is None:
            self._records = self._finish()
        return self._records


class FileSource(ElementSource[Indices]):
    """Records of files that the engine reads, prefetched where storage is slow.

    Args:
        files: The files.
        reads: Limits the reads in flight of all sources that share it.
        numbers_of: Maps the indices of elements to those of records, if they differ.

    Attributes:
        files: The files.
    """

    runs_user_code = False

    def __init__(
        self,
        files: RecordFiles,
        reads: ReadQueue | None = None,
        numbers_of: Callable[[Indices], Indices] | None = None,
    ) -> None:
        self.files = files
        self._reads = reads
        self._numbers_of = numbers_of
        self.mean_byte_len = files.mean_byte_len

    @property
    def waits_for_storage(self) -> bool:
        """See `ElementSource.waits_for_storage`."""
        return self.files.is_slow

    def request(self, index: Indices, datasets: DatasetNumbers | None) -> Indices:
        """See `ElementSource.request`."""
        return index if self._numbers_of is None else self._numbers_of(index)

    def started(self, request: Indices) -> _FileReads | None:
        """See `ElementSource.started`."""
        if not self.files.is_slow:
            return None
        read = self.files.start(request, self._reads)
        return _FileReads(functools.partial(self._read, request, read), read.num_reads)

    def num_reads(self, request: Indices, reads: _FileReads) -> int:
        """See `ElementSource.num_reads`."""
        return reads.num_reads

    def read(self, request: Indices, reads: _FileReads | None = None) -> Evaluated:
        """See `ElementSource.read`; where storage is slow, reads are concurrent."""
        if reads is None and self.files.is_slow:
            reads = self.start(request)
        return self._read(request) if reads is None else reads.records()

    def fill_function(self) -> Callable[..., tuple[int, Evaluated | None]] | None:
        """See `ElementSource.fill_function`; `None` on slow storage, where reads are concurrent."""
        return None if self.files.is_slow else functools.partial(fill_columns, self.files)

    def _read(self, index: Indices, read: PendingRead | None = None) -> Evaluated:
        """Reads the records, up to the first that cannot be read."""
        try:
            return Evaluated(self.files.read(index) if read is None else read.finish(), None)
        except Exception as failure:
            raise_interrupt(failure)  # reading one by one finds the failing record
        return one_by_one(self.files.read_one, index.tolist())


def one_by_one(read: Callable[[Any], Any], index: Iterable[Any]) -> Evaluated:
    """`read(i)` for each `i` in `index`, up to the first that fails."""
    return evaluated(_read_each, index, read)


def _read_each(
    index: Iterable[Any], read: Callable[[Any], Any], append: Callable[[Any], None]
) -> None:
    for i in index:
        append(read(i))


class ObjectSource(ElementSource[Indices]):
    """A user's object, called for one element at a time."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def first_step(self) -> Step:
        """See `ElementSource.first_step`."""
        return Step("read", self._source.__getitem__)

    def read(self, request: Indices, reads: Any = None) -> Evaluated:
        """See `ElementSource.read`."""
        return one_by_one(self._source.__getitem__, request.tolist())


class BlockObjectSource(ElementSource[Indices]):
    """A user's object with `__getitems__`, called for many elements at once."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.reads_lists = getattr(source, "_reads_lists", True)  # `SampledRecords` has it

    def read(self, request: Indices, reads: Any = None) -> Evaluated:
        """See `ElementSource.read`."""
        index = request.tolist()
        elements: list[Any] = []
        for first in range(0, len(index), tuning.MAX_REQUESTED):
            result = self._list(index[first : first + tuning.MAX_REQUESTED])
            elements += result.elements
            if result.failure is not None:
                return Evaluated(elements, result.failure)
        return Evaluated(elements, None)

    def _list(self, index: list[int]) -> Evaluated:
        """The elements at `index`; if `__getitems__` fails, each is read by `__getitem__`."""
        refusal: Exception | None = None
        try:
            answer = self._source.__getitems__(index.copy())
            elements = None if isinstance(answer, Mapping | str | bytes) else listed(answer)
            if elements is not None and len(elements) == len(index):
                return Evaluated(elements, None)
            found = (
                f"a {type(answer).__name__}" if elements is None else f"{len(elements)} elements"
            )
            refusal = ValueError(
                f"`{type(self._source).__name__}.__getitems__` must return a list with one element "
                f"for each of the {len(index)} indices it is given, got {found}; correct it, or "
                "remove it so that `__getitem__` is called"
            )
        except Exception as failure:
            raise_interrupt(failure)  # reading one by one finds the failing element
        singly = one_by_one(self._source.__getitem__, index)
        if refusal is None or singly.failure is not None:
            return singly
        return Evaluated([], refusal)


class PrefetchedObjectSource(BlockObjectSource):
    """An object of this package that can start reads: it has `_start_reads` and `_finish_reads`."""

    @property
    def waits_for_storage(self) -> bool:
        """See `ElementSource.waits_for_storage`."""
        return bool(self._source._waits_for_storage)  # noqa: SLF001 - objects have it for this

    def started(self, request: Indices) -> Any:
        """See `ElementSource.started`."""
        return self._source._start_reads(request.tolist()) if self.waits_for_storage else None  # noqa: SLF001

    def num_reads(self, request: Indices, reads: Any) -> int:
        """See `ElementSource.num_reads`."""
        return len(request)

    def read(self, request: Indices, reads: Any = None) -> Evaluated:
        """See `ElementSource.read`."""
        if reads is not None:
            try:
                return Evaluated(self._source._finish_reads(reads), None)  # noqa: SLF001
            except Exception as failure:
                raise_interrupt(failure)  # reading one by one finds the failing element
        return super().read(request)


def may_be_slow(upstream: Iterable[Any]) -> Sequence[ElementSource[Any]]:
    """See `ElementSource.may_be_slow`; those of several plans or sources."""
    return list({id(source): source for each in upstream for source in each.may_be_slow}.values())


class Gathered(NamedTuple):
    """What some elements are made of.

    Attributes:
        parts: `PendingRequest`s of sources, or `PendingElements` of other plans.
        places: What tells where these belong.
    """

    parts: Sequence[Any]
    places: Any = None

    def start(self) -> Self:
        """See `PendingRequest.start`."""
        for part in self.parts:
            part.start()
        return self

    def start_beyond(self) -> Any:
        """See `ElementSource.start_beyond`."""
        started = [part.start_beyond() for part in self.parts]
        return started if any(reads is not None for reads in started) else None

    def wait(self) -> None:
        """See `PendingRequest.wait`."""
        for part in self.parts:
            part.wait()


class GatheringSource(ElementSource[Request]):
    """Elements that are made of those of other plans or sources.

    A subclass says which ones these are (`gathered`), and makes elements of them (`joined`).

    Args:
        upstream: The plans or sources.
    """

    def __init__(self, upstream: Sequence[Any]) -> None:
        self._upstream = upstream
        self.mean_byte_len = max((each.mean_byte_len for each in upstream), default=0.0)
        self.num_records = max((each.num_records for each in upstream), default=1)
        self.reads_lists = any(each.reads_lists for each in upstream)

    @abc.abstractmethod
    def gathered(self, request: Request) -> tuple[Sequence[Any], Any]:
        """What the elements are made of: the fields of `Gathered`, no part of which is started."""

    @abc.abstractmethod
    def joined(self, parts: Sequence[Any], places: Any) -> Evaluated:
        """The elements that are made of these parts, up to the first that fails."""

    @property
    def may_be_slow(self) -> Sequence[ElementSource[Any]]:
        """See `ElementSource.may_be_slow`."""
        return may_be_slow(self._upstream)

    @property
    def has_room(self) -> bool:
        """See `ElementSource.has_room`."""
        return all(each.has_room for each in self._upstream)

    def started(self, request: Request) -> Gathered | None:
        """See `ElementSource.started`."""
        return Gathered(*self.gathered(request)).start() if self.waits_for_storage else None

    def num_reads(self, request: Request, reads: Gathered) -> int:
        """See `ElementSource.num_reads`."""
        return sum(part.num_reads for part in reads.parts)

    def start_beyond(self, request: Request) -> Any:
        """See `ElementSource.start_beyond`."""
        return Gathered(*self.gathered(request)).start_beyond()

    def read(self, request: Request, reads: Gathered | None = None) -> Evaluated:
        """See `ElementSource.read`."""
        parts, places = self.gathered(request) if reads is None else reads
        return self.joined(parts, places)


def merged(
    places: Sequence[Any],
    results: Sequence[Evaluated],
    length: int,
    failure: BaseException | None = None,
) -> Evaluated:
    """The results of several sources in the order of their positions, up to the first failure.

    Args:
        places: For each of the sources the ascending positions of its elements in the block.
        results: The elements.
        length: Positions in the block.
        failure: The exception raised for position `length`, if any.
    """
    elements: list[Any] = [None] * length
    for positions, result in zip(places, results, strict=True):
        if result.failure is not None and positions[len(result.elements)] < length:
            length, failure = int(positions[len(result.elements)]), result.failure
        for position, element in zip(positions, result.elements, strict=False):
            elements[position] = element
    return Evaluated(elements[:length], failure)
