"""Metrics for Prometheus: bytes read, latency of reads, prefetched elements.

They are registered with `prometheus_client` when the first iterator is opened, if the program has
imported it, or if `ENABLE_PYGRAIN_PROMETHEUS_TELEMETRY` is `true`, as Grain has it: then they are
served, too, on Grain's port unless `GRAINMILL_PROMETHEUS_PORT` names another, to this machine only
unless `GRAINMILL_PROMETHEUS_ADDRESS` names an address that others reach. Metrics that Grain has are
under its names. They are computed when they are scraped, so they cost nothing otherwise.
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

ENABLE_VARIABLE: Final = "ENABLE_PYGRAIN_PROMETHEUS_TELEMETRY"
PORT_VARIABLE: Final = "GRAINMILL_PROMETHEUS_PORT"
ADDRESS_VARIABLE: Final = "GRAINMILL_PROMETHEUS_ADDRESS"
_DEFAULT_PORT: Final = "9431"
_DEFAULT_ADDRESS: Final = "127.0.0.1"

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
        source = ["ArrayRecordDataSource"]
        read = core.CounterMetricFamily(
            "grain_python_data_sources_bytes_read", "Bytes read from files", labels=["source"]
        )
        read.add_metric(source, read_bytes)
        yield read
        count = core.CounterMetricFamily(
            "grain_python_data_sources_reads", "Reads of files", labels=["source"]
        )
        count.add_metric(source, reads)
        yield count
        latency = core.SummaryMetricFamily(
            "grain_python_dataset_source_read_time_ns",
            "Nanoseconds of those reads that were timed",
            labels=["source"],
        )
        latency.add_metric(source, count_value=timed, sum_value=timed_s * 1e9)
        yield latency
        yield core.GaugeMetricFamily(
            "grain_python_dataset_prefetch_depth", "Elements that are ready", ahead
        )


def _added(totals: tuple[float, ...], more: tuple[float, ...]) -> tuple[float, float, float, float]:
    reads, read_bytes, timed, timed_s = (a + b for a, b in zip(totals, more, strict=True))
    return reads, read_bytes, timed, timed_s


_collector: PipelineCollector | None = None


def export(owner: Any, recorder: Recorder) -> None:
    """Includes `recorder` in the metrics of the process, if there are any, while `owner` lives."""
    port = None
    if os.environ.get(ENABLE_VARIABLE, "").lower() == "true":
        port = os.environ.get(PORT_VARIABLE) or _DEFAULT_PORT
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
        _LOGGER.warning("`%s` is set, but `prometheus_client` is not installed", ENABLE_VARIABLE)
        return None
    _collector = PipelineCollector()
    with contextlib.suppress(ValueError):  # another package uses these names
        client.REGISTRY.register(_collector)
    if port:
        address = os.environ.get(ADDRESS_VARIABLE) or _DEFAULT_ADDRESS
        try:
            client.start_http_server(int(port), address)
        except (OSError, ValueError, OverflowError) as failure:
            _LOGGER.warning("cannot serve metrics on port %r of %s: %s", port, address, failure)
    return _collector
