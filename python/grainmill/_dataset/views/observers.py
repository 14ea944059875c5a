"""What an iterator does beside iterating, where the user asked for it: draws itself, logs times."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

from grainmill._dataset.views.statistics import report_on
from grainmill._evaluate.compile import compiled
from grainmill._plan import random_access as plan
from grainmill._stats.element_specs import spec_of
from grainmill._stats.graph import graph_text, known_specs
from grainmill._stats.summary import summary_text
from grainmill._stats.tracking import drawing_directory, logs_summary
from grainmill._threads import start_thread

if TYPE_CHECKING:
    from grainmill._plan.node import Node
    from grainmill._stats.report import Report

_LOGGER = logging.getLogger("grainmill")
# Seconds between two summaries of an iterator.
SUMMARY_INTERVAL_S = 60.0


def observe(iterator: Any) -> None:
    """Logs the times of a running iterator, or draws its pipeline, as the settings say."""
    directory = drawing_directory()
    if logs_summary():
        SummaryLog(iterator)
    elif directory is not None and not iterator._recorder.tracks:  # noqa: SLF001
        draw(iterator, directory)


def draw(iterator: Any, directory: str) -> None:
    """Draws the pipeline of `iterator` to the log, or to files in `directory` if it is not empty.

    Raises:
        OSError: The files cannot be written.
    """
    stages = report_on(iterator).stages
    for stage in stages:
        if stage.meter.spec is None and _only_reads(stage.node):
            first = compiled(stage.node).run(0, 1).elements
            stage.meter.spec = spec_of(first[0]) if first else None
    specs = known_specs(stages)
    if not directory:
        _LOGGER.info("Grain Dataset graph:\n\n%s", graph_text(stages, specs))
        return
    from grainmill._dataset.views.drawing import write_drawing  # noqa: PLC0415

    for path in write_drawing(directory, stages, specs):
        _LOGGER.info("drew the pipeline to %s", path)


def _only_reads(node: Node) -> bool:
    """Whether elements of `node` are those of its source, so that one can be read again."""
    kinds = (plan.Source, plan.Slice, plan.Repeat, plan.Shuffle, plan.WindowShuffle)
    return all(isinstance(upstream, kinds) for upstream in node.walk())


class SummaryLog:
    """Logs the summary of an iterator once a minute from a thread, while elements are taken.

    The thread does not keep the iterator alive.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = weakref.ref(iterator)
        self._stopped = threading.Event()
        self._last_elements = -1
        weakref.finalize(iterator, self._stopped.set).atexit = False
        start_thread(self._run, name="grain-summary", stop=self._stopped.set)

    def _run(self) -> None:
        while not self._stopped.wait(SUMMARY_INTERVAL_S):
            iterator = self._iterator()
            if iterator is None:
                return
            report: Report = report_on(iterator)
            del iterator
            if report.elements != self._last_elements:
                self._last_elements = report.elements
                _LOGGER.info("%s", summary_text(report))
