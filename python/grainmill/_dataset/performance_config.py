"""Numbers of workers and threads, and buffer sizes, chosen by timing samples of a pipeline."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grainmill._dataset.iter_dataset import node_of
from grainmill._dataset.iterator import iterator_over
from grainmill._dataset.with_read_options import with_read_options
from grainmill._iterators.read import Read
from grainmill._native import num_cores
from grainmill._plan.arguments import checked_integer, checked_number
from grainmill._plan.multiprocessing_options import MultiprocessingOptions
from grainmill._plan.node import MapNode, Node
from grainmill._plan.options import ReadOptions
from grainmill._stats.thread_clock import ThreadClock

if TYPE_CHECKING:
    from grainmill._dataset.iter_dataset import IterDataset
    from grainmill._dataset.map_dataset import MapDataset

_LOGGER = logging.getLogger("grainmill")

# For how long elements are timed without threads, and with each number of threads: at most, apart
# from the last element, and for the median of at least `samples_to_check` where elements are fast.
_LONGEST_S = 1.0
_SHORTEST_S = 0.1
# Numbers of threads that are tried while each makes elements come faster by this factor.
_THREADS = (16, 64)
_FASTER = 1.3
# Faster pipelines need neither threads nor workers: 10,000 elements a second. Where threads help,
# workers would take memory only to wait, so elements must take longer.
_CHEAP_S = 1e-4
_CHEAP_WITH_THREADS_S = 1e-3
# What an element from a worker costs the main process; more workers than fill half of its time
# would wait for it.
_HAND_OVER_S = 1e-5
_DEFAULT_BUFFER_SIZE = 1000


@dataclasses.dataclass(slots=True)
class PerformanceConfig:
    """Options that suit a pipeline; returned by `pick_performance_config`.

    Attributes:
        multiprocessing_options: Argument of `IterDataset.mp_prefetch`.
        read_options: Argument of `MapDataset.to_iter_dataset`.

    Example:
        >>> by_hand = grain.experimental.PerformanceConfig(
        ...     read_options=grain.ReadOptions(num_threads=4, prefetch_buffer_size=16)
        ... )
        >>> list(grain.MapDataset.range(3).to_iter_dataset(by_hand.read_options))
        [0, 1, 2]
    """

    multiprocessing_options: MultiprocessingOptions | None = None
    read_options: ReadOptions | None = None


def pick_performance_config(
    ds: MapDataset[Any] | IterDataset[Any],
    *,
    ram_budget_mb: int,
    max_workers: int | None,
    max_buffer_size: int | None,
    samples_to_check: int = 5,
) -> PerformanceConfig:
    """Chooses numbers of workers and threads, and buffer sizes, by timing samples of a pipeline.

    Elements of `ds` are computed in this process, first without threads, then with more and more
    threads while these make elements come faster; for about a second each, or one element.
    Functions that hold the interpreter lock, and stages of an `IterDataset` that take long, get
    workers: as many as cores, and as this process can take elements from. Where elements are cheap,
    or threads suffice, there are none. Everything that was opened is closed again.

    The order of elements from `mp_prefetch`, and its saved states, depend on the number of workers.
    Timings differ from run to run, so save the number that was picked with the model's checkpoint.

    Args:
        ds: The dataset before `mp_prefetch`, or a `MapDataset` before `to_iter_dataset`. It may be
            endless.
        ram_budget_mb: Limit on the memory of prefetched elements, in MiB, assuming that all are as
            large as the samples: at most so many elements are in the buffers of readers and of
            workers.
        max_workers: Maximum number of workers; `None` for the number of CPU cores.
        max_buffer_size: Maximum of `prefetch_buffer_size`; `None` for 1000.
        samples_to_check: Minimum number of elements whose size and time are taken, if there are
            as many and they do not take longer than a second.

    Returns:
        Options for `mp_prefetch` and `to_iter_dataset`.

    Raises:
        TypeError: A limit is not a number.
        ValueError: A limit is negative, or `samples_to_check` is not positive.

    Example:
        >>> ds = grain.MapDataset.range(1000).map(lambda x: x + 1).batch(10)
        >>> picked = grain.experimental.pick_performance_config(
        ...     ds, ram_budget_mb=64, max_workers=4, max_buffer_size=100
        ... )
        >>> picked.multiprocessing_options.num_workers, picked.read_options.prefetch_buffer_size
        (0, 100)
        >>> ds = ds.to_iter_dataset(picked.read_options)
        >>> ds = ds.mp_prefetch(picked.multiprocessing_options)
    """
    num_samples = checked_integer(samples_to_check, "samples_to_check", minimum=1)
    limits = Limits.of(ram_budget_mb, max_workers, max_buffer_size)
    node = node_of(ds)
    if isinstance(node, MapNode):
        node = Read((node,), ReadOptions(), allow_nones=False)
    measured = _measured(node, num_samples)
    config = decide(measured, limits)
    _LOGGER.info("%s for %s and %s", config, measured, limits)
    return config


class Limits(NamedTuple):
    """What may be chosen at most.

    Attributes:
        ram_bytes: Bytes of prefetched elements.
        workers: Worker processes.
        buffer_size: Elements that a reader prefetches.
        cores: CPU cores of this machine that this process may use.
    """

    ram_bytes: int
    workers: int
    buffer_size: int
    cores: int

    @classmethod
    def of(cls, ram_budget_mb: Any, max_workers: Any, max_buffer_size: Any) -> Limits:
        """The limits that these arguments of `pick_performance_config` set."""
        ram = checked_number(ram_budget_mb, "ram_budget_mb")
        if not ram >= 0:
            raise ValueError(f"`ram_budget_mb` must not be negative, got {ram_budget_mb}")
        cores = num_cores()
        if max_workers is None:
            max_workers = cores
        if max_buffer_size is None:
            max_buffer_size = _DEFAULT_BUFFER_SIZE
        workers = checked_integer(max_workers, "max_workers", minimum=0)
        buffer_size = checked_integer(max_buffer_size, "max_buffer_size", minimum=0)
        return cls(int(ram * 2**20), workers, buffer_size, cores)


class Measured(NamedTuple):
    """Measurements of a pipeline.

    Attributes:
        element_s: Seconds per element without threads; 0 if there are no elements.
        busy_cores: Cores that the calling thread could have used meanwhile: about 1 if functions
            compute, and less if they wait.
        threads: The number of threads that helped most; 0 if threads do not help.
        threaded_s: Seconds per element with these threads.
        output_bytes: Mean size of an element.
        read_bytes: Mean size of an element of a reader, summed over all readers.
    """

    element_s: float
    busy_cores: float
    threads: int
    threaded_s: float
    output_bytes: float
    read_bytes: float


def decide(measured: Measured, limits: Limits) -> PerformanceConfig:
    """The options for a pipeline with these measurements."""
    threads = measured.threads
    element_s = measured.threaded_s if threads else measured.element_s
    busy_cores = max(measured.busy_cores * measured.element_s / max(element_s, 1e-9), 1e-3)
    by_cores = int(limits.cores / busy_cores + 0.25)  # a busy core is seldom measured as exactly 1
    by_hand_over = int(element_s / (2 * _HAND_OVER_S))
    affordable = int(limits.ram_bytes / max(measured.output_bytes, 1.0))
    num_workers = 0
    if element_s > (_CHEAP_WITH_THREADS_S if threads else _CHEAP_S) and by_cores > 1:
        num_workers = min(limits.workers, affordable, by_cores, by_hand_over)
    left = limits.ram_bytes - num_workers * measured.output_bytes
    per_process = left / max(1, num_workers)
    buffer_size = min(limits.buffer_size, max(0, int(per_process / max(measured.read_bytes, 1.0))))
    read_options = ReadOptions(min(max(threads, 1), buffer_size), buffer_size)
    return PerformanceConfig(MultiprocessingOptions(num_workers), read_options)


def _measured(node: Node, num_samples: int) -> Measured:
    clock = ThreadClock()
    wall_s, ready_s = time.perf_counter(), clock.read().ready_s
    times, sizes = _sampled(with_read_options(node, ReadOptions(0, 0)), num_samples)
    wall_s, ready_s = time.perf_counter() - wall_s, clock.read().ready_s - ready_s
    element_s = float(np.median(times)) if times else 0.0
    best_s, best = element_s, 0
    for threads in _THREADS:
        if best_s <= _CHEAP_S:
            break
        threaded = with_read_options(node, ReadOptions(threads, 2 * threads))
        times, _ = _sampled(threaded, max(num_samples, 3 * threads))
        # Elements arrive several at a time.
        mean_s = _mean(times) if times else math.inf
        if mean_s * _FASTER > best_s:
            break
        best_s, best = mean_s, threads
    return Measured(
        element_s,
        ready_s / wall_s if clock.is_known else 1.0,
        best,
        best_s,
        _mean(sizes) if sizes else 0.0,
        sum(_read_bytes(node, num_samples)) if sizes else 0.0,
    )


def _sampled(node: Node, num_samples: int) -> tuple[list[float], list[int]]:
    """Seconds per element, without the first, unless it is the only one, and their sizes."""
    times: list[float] = []
    sizes: list[int] = []
    with iterator_over(node) as iterator:
        start_s = before_s = time.perf_counter()
        for element in iterator:
            now_s = time.perf_counter()
            times.append(now_s - before_s)
            if len(sizes) < num_samples:
                sizes.append(size_of(element))
            before_s = time.perf_counter()
            enough_s = _SHORTEST_S if len(times) > num_samples else _LONGEST_S
            if before_s - start_s > enough_s:
                break
    return times[1:] or times, sizes


def _read_bytes(node: Node, num_samples: int) -> list[float]:
    """The mean size of an element, for each reader of the plan."""
    node = with_read_options(node, ReadOptions(0, 0))
    readers = [upstream for upstream in node.walk(until=Read) if isinstance(upstream, Read)]
    share = math.ceil(num_samples / max(1, len(readers)))
    means = []
    for reader in readers:
        _, sizes = _sampled(reader, share)
        means.append(_mean(sizes[:share]) if sizes else 0.0)
    return means


def _mean(numbers: list[float] | list[int]) -> float:
    return sum(numbers) / len(numbers)


def size_of(element: Any) -> int:
    """The bytes of an element: of its arrays, and what Python says of other objects."""
    if isinstance(element, dict):
        return sum(size_of(value) for value in element.values())
    if isinstance(element, list | tuple):
        return sum(size_of(item) for item in element)
    return element.nbytes if isinstance(element, np.ndarray) else sys.getsizeof(element)
