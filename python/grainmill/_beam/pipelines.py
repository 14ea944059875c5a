"""The functions of `array_record.beam.pipelines`, which make whole pipelines."""

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import apache_beam as beam
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import PipelineOptions

from grainmill._beam.convert import ConvertTFRecordToArrayRecord
from grainmill._beam.files import BeamStore, absolute, matched
from grainmill._beam.tfrecord import records

Options: TypeAlias = PipelineOptions | Mapping[str, Any] | Sequence[str] | None

_SUFFIX = ".arrayrecord"


def convert_tf_to_arrayrecord_disk(
    num_shards: int = 1,
    args: Mapping[str, str | None] | None = None,
    pipeline_options: Options = None,
) -> beam.Pipeline:
    """Makes a pipeline that converts TFRecord files to a number of ArrayRecord files.

    For programs that call the function of this name in `array_record.beam.pipelines`; others use
    `ConvertTFRecordToArrayRecord`, which it applies. The names end with `.arrayrecord`, and files
    with such names are replaced.

    Args:
        num_shards: The number of output files.
        args: `"input"`, a pattern, and `"output"`, what the names of the output files begin with.
        pipeline_options: Options of the pipeline: Beam's object, a dict or a list of arguments.

    Returns:
        The pipeline, which has not been run.

    Raises:
        ValueError: `args` lacks one of them, or `num_shards` is less than 1.

    Example:
        >>> from grainmill.beam import convert_tf_to_arrayrecord_disk
        >>> with open("one.tfrecord", "wb") as file:
        ...     _ = file.write(bytes.fromhex("0300000000000000b099490e6162636e57f121"))
        >>> names = {"input": "one.tfrecord", "output": "out"}
        >>> result = convert_tf_to_arrayrecord_disk(num_shards=1, args=names).run()
        >>> result.wait_until_finish()
        'DONE'
        >>> list(grain.sources.ArrayRecordDataSource("out-00000-of-00001.arrayrecord"))
        [b'abc']
    """
    return _converting(num_shards, args, pipeline_options)


def convert_tf_to_arrayrecord_disk_match_shards(
    args: Mapping[str, str | None] | None = None, pipeline_options: Options = None
) -> beam.Pipeline:
    """Makes a pipeline that converts each TFRecord file to an ArrayRecord file.

    The output files are numbered in the order of the input's names; otherwise this is
    `convert_tf_to_arrayrecord_disk`.

    Args:
        args: `"input"`, a pattern, and `"output"`, what the names of the output files begin with.
        pipeline_options: Options of the pipeline: Beam's object, a dict or a list of arguments.

    Returns:
        The pipeline, which has not been run.

    Raises:
        ValueError: `args` lacks one of them.

    Example:
        >>> from grainmill.beam import convert_tf_to_arrayrecord_disk_match_shards
        >>> with open("one.tfrecord", "wb") as file:
        ...     _ = file.write(bytes.fromhex("0300000000000000b099490e6162636e57f121"))
        >>> names = {"input": "*.tfrecord", "output": "out"}
        >>> result = convert_tf_to_arrayrecord_disk_match_shards(args=names).run()
        >>> result.wait_until_finish()
        'DONE'
    """
    return _converting(None, args, pipeline_options)


def convert_tf_to_arrayrecord_gcs(
    overwrite_extension: bool = False,  # noqa: FBT001, FBT002 - its callers pass it so
    file_path_suffix: str = _SUFFIX,
    args: Mapping[str, str | None] | None = None,
    pipeline_options: Options = None,
) -> beam.Pipeline:
    """Makes a pipeline that converts each TFRecord file to one of the same name in a folder.

    The folder may be in a bucket, as the name says, or anywhere that Beam's file systems reach.
    Files with such names are replaced.

    Args:
        overwrite_extension: Whether the suffix replaces the extension of the input's name; it is
            appended otherwise.
        file_path_suffix: What the names of the output files end with.
        args: `"input"`, a pattern, and `"output"`, a folder.
        pipeline_options: Options of the pipeline: Beam's object, a dict or a list of arguments.

    Returns:
        The pipeline, which has not been run.

    Raises:
        ValueError: `args` lacks one of them.

    Example:
        >>> from grainmill.beam import convert_tf_to_arrayrecord_gcs
        >>> with open("one.tfrecord", "wb") as file:
        ...     _ = file.write(bytes.fromhex("0300000000000000b099490e6162636e57f121"))
        >>> names = {"input": "one.tfrecord", "output": "out"}
        >>> pipeline = convert_tf_to_arrayrecord_gcs(overwrite_extension=True, args=names)
        >>> pipeline.run().wait_until_finish()
        'DONE'
        >>> list(grain.sources.ArrayRecordDataSource("out/one.arrayrecord"))
        [b'abc']
    """
    pattern, folder = _input_and_output(args)
    pipeline = beam.Pipeline(options=_options(pipeline_options))
    _ = (
        pipeline
        | "Pattern" >> beam.Create([pattern])
        | "Match" >> beam.FlatMap(matched)
        | "Spread files" >> beam.Reshuffle()
        | "Convert"
        >> beam.Map(_convert, folder, file_path_suffix, overwrite_extension=overwrite_extension)
    )
    return pipeline


def _converting(
    num_shards: int | None, args: Mapping[str, str | None] | None, options: Options
) -> beam.Pipeline:
    pattern, prefix = _input_and_output(args)
    pipeline = beam.Pipeline(options=_options(options))
    _ = pipeline | ConvertTFRecordToArrayRecord(
        pattern, prefix, num_shards, file_name_suffix=_SUFFIX, overwrite=True
    )
    return pipeline


def _input_and_output(args: Mapping[str, str | None] | None) -> tuple[str, str]:
    given = dict(args or {})
    pattern, output = given.get("input"), given.get("output")
    if not pattern or not output:
        raise ValueError(f"`args` must have paths as `input` and `output`, got {given}")
    return absolute(pattern), absolute(output)


def _options(options: Options) -> PipelineOptions:
    if isinstance(options, PipelineOptions):
        return options
    if isinstance(options, Mapping):
        return PipelineOptions.from_dictionary(dict(options))
    return PipelineOptions(list(options or []))


def _convert(path: str, folder: str, suffix: str, *, overwrite_extension: bool) -> str:
    name = FileSystems.split(path)[1]
    stem = posixpath.splitext(name)[0] if overwrite_extension else name
    output = str(FileSystems.join(folder, stem + suffix))
    BeamStore().write_records(output, records(path, "auto"), "group_size:1")
    return output
