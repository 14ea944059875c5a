"""The handler by which Orbax saves and restores iterators."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from grainmill._checkpoint import states
from grainmill._checkpoint.items import check_has_state

if TYPE_CHECKING:
    from types import ModuleType

# Orbax stores it in checkpoints; with Grain's, each restores what the other has saved.
_GRAINS_TYPE = "grain._src.python.checkpoint.handler.CheckpointHandler"
_type_strings = [_GRAINS_TYPE]


@functools.cache
def arguments_of_orbax() -> ModuleType:
    """The module with the arguments for Orbax, which it imports; it registers the handler there."""
    from grainmill._checkpoint import orbax  # noqa: PLC0415

    # Orbax accepts one class for a name only, and a program may use Grain, too.
    _type_strings.append(f"{CheckpointHandler.__module__}.{CheckpointHandler.__qualname__}")
    try:
        orbax.register(CheckpointHandler)
    finally:
        _type_strings.pop()
    return orbax


class CheckpointHandler:
    """Saves the states of iterators into the directory of a checkpoint, and restores them.

    It is used by Orbax' `CheckpointManager` and `Checkpointer`, or alone. Each process writes
    `process_{index}-of-{count}.json`, its state in the form of Grain, which Grain restores as well;
    an elastic iterator over sequential datasets also writes `shard_state_{number}.json` for each of
    them. A file is complete or absent, also if the process is killed. `pipeline_*.grainmill` lies
    beside them and says which pipeline they belong to: its stages with their parameters, lengths
    and seeds, and the names of functions and files. Restoring into a pipeline that differs in these
    is refused; directories, options of reading and prefetching, and the code of functions may
    differ. What leaves all positions valid is accepted and logged: more epochs, a higher limit, and
    other datasets or weights of an `IterDataset.mix` of a mapping. Where that
    file is missing, as in checkpoints of Grain, any state that fits is taken.

    Args:
        check_pipeline: Whether `restore` refuses the state of another pipeline. Setting the
            environment variable `GRAINMILL_RESTORE_ANYWAY=1` has the effect of `False` everywhere.

    Example:
        >>> import pathlib
        >>> directory = pathlib.Path("checkpoint")
        >>> directory.mkdir()
        >>> ds = grain.MapDataset.range(10).shuffle(seed=0).batch(2).to_iter_dataset()
        >>> batches = iter(ds)
        >>> _ = next(batches)
        >>> handler = grain.checkpoint.CheckpointHandler()
        >>> handler.save(directory, batches)
        >>> restored = handler.restore(directory, iter(ds))
        >>> (next(restored) == next(batches)).all()
        np.True_

        With Orbax, beside the parameters of a model:

        >>> import orbax.checkpoint as ocp
        >>> with ocp.CheckpointManager(pathlib.Path("run").absolute()) as manager:
        ...     args = ocp.args.Composite(data=grain.checkpoint.CheckpointSave(batches))
        ...     saved = manager.save(1, args=args)
        ...     args = ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(iter(ds)))
        ...     restored = manager.restore(1, args=args).data
        >>> (next(restored) == next(batches)).all()
        np.True_
    """

    def __init__(self, *, check_pipeline: bool = True) -> None:
        self._check_pipeline = check_pipeline
        if "orbax.checkpoint" in sys.modules:  # it warns about handlers that are not registered
            arguments_of_orbax()

    def save(self, directory: Any, item: Any = None, args: Any = None) -> None:
        """Writes the present state of an iterator.

        Args:
            directory: A path, not a string, to a directory that exists. Its files are overwritten.
            item: The iterator of a dataset or of a `DataLoader`.
            args: An object with the iterator as attribute `item`, used if there is no `item`.

        Raises:
            TypeError: JSON cannot represent the state; nothing is written.
            FileNotFoundError: There is no such directory.
        """
        states.write_all(_checked_directory(directory), states.files_of(_chosen(item, args)))

    def restore(self, directory: Any, item: Any = None, args: Any = None) -> Any:
        """Makes an iterator continue from the state in a directory, and starts its prefetching.

        Args:
            directory: A path to the directory, as for `save`.
            item: An iterator over the pipeline that saved the state.
            args: An object with the iterator as attribute `item`, used if there is no `item`.

        Returns:
            The iterator that was passed.

        Raises:
            ValueError: There is no state of this process, or it was saved from another pipeline.
        """
        item = _chosen(item, args)
        found = states.find(_checked_directory(directory), item)
        # A handler derived from this class need not call its `__init__`.
        states.apply(found, item, check_pipeline=getattr(self, "_check_pipeline", True))
        start = getattr(item, "start_prefetch", None)
        if start is not None and found.shard_states is None:
            start()
        return item

    def structure(self, directory: Any) -> Any:
        """Returns `None`: a state has no structure of arrays that Orbax could show.

        Args:
            directory: The directory of the checkpoint.
        """

    def metadata(self, directory: Any) -> Any:
        """Returns `None`, as `structure` does.

        Args:
            directory: The directory of the checkpoint.
        """

    def finalize(self, directory: Any) -> None:
        """Does nothing; `save` has finished the files.

        Args:
            directory: The directory of the checkpoint.
        """

    def close(self) -> None:
        """Does nothing; the handler holds no resources."""

    @classmethod
    def typestr(cls) -> str:
        """Returns the name by which checkpoints refer to this class: that of Grain's handler."""
        if cls is CheckpointHandler:
            return _type_strings[-1]
        return f"{cls.__module__}.{cls.__qualname__}"


def _chosen(item: Any, args: Any) -> Any:
    chosen = args.item if item is None and args is not None else item
    check_has_state(chosen)
    return chosen


def _checked_directory(directory: Any) -> Any:
    if isinstance(directory, str):
        raise TypeError(
            f"`directory` must be a path, got the text {directory!r}: pass "
            f"`pathlib.Path({directory!r})`, or for a bucket a path of `etils.epath`"
        )
    return directory
