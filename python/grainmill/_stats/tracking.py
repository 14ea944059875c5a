"""Which statistics a pipeline records, by the settings of the process and its own options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grainmill._plan.options import ExecutionTrackingMode
from grainmill._plan.settings import config
from grainmill._stats.element_specs import spec_of
from grainmill._stats.meters import Recorder

if TYPE_CHECKING:
    from grainmill._plan.options import DatasetOptions


def logs_summary() -> bool:
    """Whether the execution summary is logged once a minute."""
    return bool(config.py_debug_mode)


def drawing_directory() -> str | None:
    """Where pipelines are drawn; empty for the log, `None` for nowhere."""
    directory: str | None = config.py_dataset_visualization_output_dir
    return directory


def tracks(options: DatasetOptions) -> bool:
    """Whether every pull of a pipeline with these options is timed."""
    return logs_summary() or options.execution_tracking_mode == ExecutionTrackingMode.STAGE_TIMING


def new_recorder(options: DatasetOptions) -> Recorder:
    """The recorder of a pipeline with these options."""
    is_tracked = tracks(options)
    draws = drawing_directory() is not None and not is_tracked
    return Recorder(tracks=is_tracked, spec_of=spec_of if draws or is_tracked else None)
