"""Metrics for Prometheus: bytes read, latency of reads, prefetched elements.

They are registered with `prometheus_client` when the first iterator is opened, if the program has
imported it, or if `GRAIN_PROMETHEUS_PORT` names a port to serve them on. They are computed when
they are scraped, so they cost nothing otherwise.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from grainmill._stats.meters import Recorder

PORT_VARIABLE: Final = "GRAIN_PROMETHEUS_PORT"

_LOGGER = logging.getLogger("grainmill")


class PipelineCollector:
    """Collects the metrics of all iterators of the process; those of closed ones stay in sums."""

    def __init__(self) -> None:
        self._recorders: dict[int, Recorder] = {}
        self._closed = (0.0, 0.0, 0.0, 0.0)
        self._lock = threading.Lock()

    def add(self, owner: Any, recorder: Recorder) -> None:
        """Includes what `recorder` has while `owner` lives, and its sums afterwards."""
        self._recorders[id(recorder)] = recorder
        weakref.finalize(owner, self._close, id(recorder)).atexit = False

    def _close(self, key: int) -> None:
        recorder = self._recorders.pop(key, None)
        if recorder is not None:
            self._closed = _added(self._closed, recorder.all_files())

    def collect(self) -> Iterator[Any]:
        """Yields the metrics, as `prometheus_client` asks for them."""
        core: Any = sys.modules["prometheus_client.core"]
        totals, ahead = self._closed, 0
        for recorder in list(self._recorders.values()):
            totals = _added(totals, recorder.all_files())
            ahead += sum(read.ahead()[0] for read in recorder.all_reads())
        reads, read_bytes, timed, timed_s = totals
        yield core.CounterMetricFamily("grain_bytes_read", "Bytes read from files", read_bytes)
        yield core.CounterMetricFamily("grain_reads", "Reads of files", reads)
        yield core.SummaryMetricFamily(
            "grain_read_latency_seconds",
            "Duration of those reads that were timed",
            count_value=timed,
            sum_value=timed_s,
        )
        yield core.GaugeMetricFamily("grain_prefetch_depth", "Elements that are ready", ahead)


def _added(totals: tuple[float, ...], more: tuple[float, ...]) -> tuple[float, float, float, float]:
    reads, read_bytes, timed, timed_s = (a + b for a, b in zip(totals, more, strict=True))
    return reads, read_bytes, timed, timed_s


_collector: PipelineCollector | None = None


def export(owner: Any, recorder: Recorder) -> None:
    """Includes `recorder` in the metrics of the process, if there are any, while `owner` lives."""
    port = os.environ.get(PORT_VARIABLE)
    if not port and "prometheus_client" not in sys.modules:
        return
    collector = _registered(port)
    if collector is not None:
        collector.add(owner, recorder)


def _registered(port: str | None) -> PipelineCollector | None:
    """The collector of the process, registered and served at the first call."""
    global _collector  # noqa: PLW0603 - the registry is one of the process, too
    if _collector is not None:
        return _collector
    try:
        client: Any = importlib.import_module("prometheus_client")
        importlib.import_module("prometheus_client.core")
    except ImportError:
        _LOGGER.warning("`%s` is set, but `prometheus_client` is not installed", PORT_VARIABLE)
        return None
    _collector = PipelineCollector()
    with contextlib.suppress(ValueError):  # another package uses these names
        client.REGISTRY.register(_collector)
    if port:
        try:
            client.start_http_server(int(port))
        except (OSError, ValueError, OverflowError) as failure:
            _LOGGER.warning("cannot serve metrics on port %r: %s", port, failure)
    return _collector
