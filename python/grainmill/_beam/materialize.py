"""Pipelines run by ranges of positions, one shard at a time."""

import os
from collections.abc import Callable
from typing import Any

import apache_beam as beam

from grainmill import MapDataset, ReadOptions
from grainmill._beam.files import BeamStore, absolute
from grainmill._materialize import Job, JobOptions, job_of


class MaterializeDataset(beam.PTransform):  # type: ignore[misc]
    """Computes the elements of a `MapDataset` and writes them to shards.

    Each shard holds a range of positions: shard `s` of `num_shards` begins at the position
    `len(ds) * s // num_shards`, and its record `j` is the element at that position plus `j`. So the
    shards, read one after another, are the dataset in its order, whatever the runner, its workers
    and its bundles. Elements that `filter` drops are left out, and those behind them move up.

    A shard gets its name when it is complete. If the pipeline is run again, shards that are there
    are kept, so that an interrupted run goes on. A small file beside them,
    `PREFIX-of-NNNNN.materialize.json`, says which pipeline they are of, and another one is refused.
    It has the stages, their parameters and the names of functions, not their code: change `version`
    when a function changes.

    The transform is applied to a pipeline, and yields the paths of all shards. The dataset is
    pickled by cloudpickle; workers need what its functions import, and access to its sources. A
    worker computes a shard with the threads of `read_options`, so have at least as many shards as
    workers.

    Args:
        ds: The dataset, which must have an end.
        num_shards: The number of files, at least 1.
        file_path_prefix: What the paths begin with, of any of Beam's file systems; followed by
            `-00000-of-00010`.
        serialize: A function from an element to `bytes`, such as `to_example` for dicts of arrays;
            needed unless elements are `bytes`.
        options: Options of an `ArrayRecordWriter`.
        file_name_suffix: What the paths end with.
        read_options: How a worker computes the elements of its shard.
        version: Any text; shards written with another one are not kept.
        overwrite: Whether shards of another pipeline may be replaced.

    Raises:
        TypeError: `ds` is not a `MapDataset`.
        ValueError: `num_shards` is less than 1, or `ds` has no end.

    Example:
        >>> import apache_beam as beam
        >>> from grainmill.beam import MaterializeDataset
        >>> ds = grain.MapDataset.range(5).map(lambda x: f"element {x}".encode())
        >>> with beam.Pipeline() as pipeline:
        ...     paths = pipeline | MaterializeDataset(ds, 2, "data")
        >>> paths = ["data-00000-of-00002.array_record", "data-00001-of-00002.array_record"]
        >>> list(grain.sources.ArrayRecordDataSource(paths[1]))
        [b'element 2', b'element 3', b'element 4']
    """

    def __init__(
        self,
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
    ) -> None:
        super().__init__()
        given = JobOptions(serialize, options, file_name_suffix, read_options, version, overwrite)
        self._job = job_of(ds, num_shards, absolute(file_path_prefix), given)

    def expand(self, pbegin: Any) -> Any:
        """Applies the transform; Beam calls this.

        Args:
            pbegin: The pipeline.

        Returns:
            The paths of the shards.
        """
        once = pbegin | "Job" >> beam.Create([self._job])
        job = beam.pvalue.AsSingleton(once)  # it may be large, and each worker gets it once
        written = (
            once
            | "Begin" >> beam.FlatMap(_missing)
            | "Spread shards" >> beam.Reshuffle()
            | "Write" >> beam.Map(_write, job)
        )
        return once | "Paths" >> beam.FlatMap(_paths, beam.pvalue.AsList(written))


def _missing(job: Job) -> list[int]:
    return job.begin(BeamStore())


def _write(shard: int, job: Job) -> int:
    return job.write(shard, BeamStore())


def _paths(job: Job, written: list[int]) -> list[str]:
    del written  # which are waited for
    return job.finish(BeamStore())
