"""Pipelines run on a Ray cluster by ranges of positions.

`pip install 'grainmill[ray]'` installs what this module needs.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import ray
except ImportError as failure:
    raise ImportError(
        "`grainmill.ray` needs the package `ray`: pip install 'grainmill[ray]'"
    ) from failure

from grainmill import MapDataset, ReadOptions
from grainmill._materialize import Job, JobOptions, LocalStore, job_of
from grainmill.transforms import to_example

__all__ = ["materialize", "to_example"]


def __dir__() -> list[str]:
    return sorted(__all__)


def materialize(
    ds: MapDataset[Any],
    num_shards: int,
    file_path_prefix: str | os.PathLike[str],
    *,
    serialize: Callable[[Any], bytes] | None = None,
    options: str = "group_size:1",
    file_name_suffix: str = ".array_record",
    read_options: ReadOptions | None = None,
    version: str = "",
    overwrite: bool = False,
    num_cpus: float = 1,
    max_retries: int = 3,
) -> list[str]:
    """Computes the elements of a `MapDataset` on a Ray cluster and writes them to shards.

    Each shard holds a range of positions: shard `s` of `num_shards` begins at the position
    `len(ds) * s // num_shards`, and its record `j` is the element at that position plus `j`.
    Elements that `filter` drops are left out, and those behind them move up. The files are those
    that `grainmill.beam.MaterializeDataset` writes.

    Each shard is a task of Ray. It gets its name when it is complete; if the function is called
    again, shards that are there are kept, so that an interrupted run goes on. A small file beside
    them says which pipeline they are of, and another one is refused.

    Args:
        ds: The dataset, which must have an end. It is pickled by cloudpickle.
        num_shards: The number of files, at least 1.
        file_path_prefix: What the paths begin with, in a folder that all nodes have mounted;
            followed by `-00000-of-00010`.
        serialize: A function from an element to `bytes`, such as `to_example` for dicts of arrays;
            needed unless elements are `bytes`.
        options: Options of an `ArrayRecordWriter`.
        file_name_suffix: What the paths end with.
        read_options: How a task computes the elements of its shard.
        version: Any text; shards written with another one are not kept. Change it when a function
            changes, whose code is not compared.
        overwrite: Whether shards of another pipeline may be replaced.
        num_cpus: The number of processors that Ray reserves for a task.
        max_retries: How often a task is started again whose worker or node was lost.

    Returns:
        The paths of the shards.

    Raises:
        TypeError: `ds` is not a `MapDataset`.
        ValueError: `num_shards` is less than 1, or `ds` has no end.
        GrainmillError: There are shards of another pipeline, and `overwrite` is not set.
    """
    prefix = Path(file_path_prefix).absolute()
    given = JobOptions(serialize, options, file_name_suffix, read_options, version, overwrite)
    job = job_of(ds, num_shards, prefix, given)
    shards = job.begin(LocalStore())
    write = ray.remote(num_cpus=num_cpus, max_retries=max_retries)(_write)
    shared = ray.put(job)
    pending = [write.remote(shared, shard) for shard in shards]
    while pending:  # as they finish, so that the first failure is raised at once
        finished, pending = ray.wait(pending)
        ray.get(finished)
    return job.finish(LocalStore())


def _write(job: Job, shard: int) -> int:
    return job.write(shard, LocalStore())
