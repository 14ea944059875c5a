"""States in the files of a checkpoint: what to write for an iterator, and restoring from it.

Beside the state, in Grain's form, lies a record of our own: which pipeline it belongs to, and the
digests of the files that were written with it. So a file that another program or an earlier run
left there is not taken for a part of this checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import time
from typing import TYPE_CHECKING, Any, NoReturn

from grainmill._checkpoint import changes, ends, files, pipeline

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Mapping

RESTORE_ANYWAY = "GRAINMILL_RESTORE_ANYWAY"
"""The environment variable that allows restoring a state of another pipeline."""

# To be raised whenever descriptions change; a description of another format is not compared.
_FORMAT = 1


def _serialized(item: Any, state: Any) -> str:
    """The `state` of an iterator as text.

    Raises:
        TypeError: JSON cannot represent the state.
    """
    if isinstance(state, bytes) and not getattr(item, "_STATE_IS_DICT", False):
        return state.decode()
    return _json(state)


def _json(state: Any) -> str:
    try:
        return json.dumps(state, indent=4)
    except (TypeError, ValueError) as failure:
        failure.add_note(
            f"`{_unserializable(state, 'state')}` cannot be written as JSON, so nothing was "
            "written; a state that goes into a checkpoint has numbers, texts, lists and dicts only"
        )
        raise


def _unserializable(state: Any, path: str) -> str:
    """Where in `state` the first value lies that JSON cannot represent."""
    children: list[tuple[str, Any]] = []
    if isinstance(state, dict):
        children = [(f"{path}[{key!r}]", inner) for key, inner in state.items()]
    elif isinstance(state, list | tuple):
        children = [(f"{path}[{number}]", inner) for number, inner in enumerate(state)]
    for where, inner in children:
        try:
            json.dumps(inner)
        except (TypeError, ValueError, RecursionError):
            return (
                where if type(inner) not in {dict, list, tuple} else _unserializable(inner, where)
            )
    return path


def files_of(item: Any) -> dict[str, str]:
    """The names and contents of the files that hold the present state of `item`, in order.

    Raises:
        TypeError: JSON cannot represent the state.
    """
    index, count = files.process_index_and_count()
    state_file = files.state_file(index, count)
    saved = {state_file: item.get_state()}
    texts = {state_file: _serialized(item, saved[state_file])}
    shards = _shard_states(item)
    for shard, state in (shards or {}).items():
        name = files.shard_file(int(shard))
        saved[name], texts[name] = state, _json(state)
    record: dict[str, Any] = {
        "format": _FORMAT,
        "pipeline": described(item),
        "digests": {name: files.digest(text) for name, text in texts.items()},
        "time": time.time(),
        "ends": {name: found for name, state in saved.items() if (found := ends.found_in(state))},
    }
    options = getattr(item, "shard_options", None)
    if options is not None:
        record["shard"] = [options.shard_index, options.shard_count]
    # Written first: with the state of an earlier save it has no effect.
    return {files.record_file(index, count): json.dumps(record, indent=1), **texts}


def write_all(directory: Any, texts: Mapping[str, str]) -> None:
    """Writes files into a directory that exists."""
    for name, text in texts.items():
        files.write(directory / name, text)


def described(item: Any) -> pipeline.Stages | None:
    """The pipeline of an iterator; `None` if it is unknown."""
    # A state must be saved whatever objects of the user do when they are asked about themselves.
    with contextlib.suppress(Exception):
        found: pipeline.Stages | None = item._describe_pipeline()  # noqa: SLF001 - of all iterators
        return found
    return None


def _shard_states(item: Any) -> dict[int, Any] | None:
    """The states of the datasets of an elastic iterator; `None` if `item` is another iterator."""
    if not hasattr(item, "shard_options") or not hasattr(item, "get_shard_states"):
        return None
    try:
        states: dict[int, Any] = item.get_shard_states()
    except NotImplementedError:  # it reads a `MapDataset`, of which one number is the state
        return None
    return states


@dataclasses.dataclass
class _Record:
    """What lies beside the state of one process.

    Attributes:
        name: The name of its file.
        digests: The digests of the files written with it, by name.
        pipeline: The description of the pipeline; `None` if unknown.
        shard: The index and count of the shard of an elastic iterator, if it is one.
        time: When it was written, in seconds since 1970.
        ends: What `ends.found_in` the states returned, by the names of their files; `None` if it
            was not written.
    """

    name: str
    digests: dict[str, str]
    pipeline: Any = None
    shard: list[int] | None = None
    time: float = 0.0
    ends: dict[str, list[Any]] | None = None

    @classmethod
    def read(cls, directory: Any, name: str) -> _Record | None:
        """The record `name`; `None` if there is none, or a later version wrote it."""
        text = _text(directory, name)
        if text is None:
            return None
        try:
            found = json.loads(text)
            if found["format"] != _FORMAT:
                return None
            return cls(
                name,
                found["digests"],
                found["pipeline"],
                found.get("shard"),
                found["time"],
                found.get("ends"),
            )
        except (ValueError, KeyError, TypeError):
            return None

    def has(self, name: str, text: str) -> bool:
        """Whether the file `name` was written with this record."""
        return self.digests.get(name) == files.digest(text)


def _text(directory: Any, name: str) -> str | None:
    path = directory / name
    if not path.exists():
        return None
    try:
        text: str = path.read_text()
    except UnicodeDecodeError as failure:
        raise _damaged(path, "bytes that are not text") from failure
    return text


def _parsed(
    directory: Any, name: str, text: str, item: Any, records: Iterable[_Record | None]
) -> Any:
    """The state that a file holds, as `get_state` of `item` returned it.

    One of `records` may be of the file, and so have a part of it.

    Raises:
        ValueError: It is damaged.
    """
    if not _has_dicts(item):
        return text.encode()
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as failure:
        found = f"{failure} of {len(text)} characters" if text.strip() else "nothing"
        raise _damaged(directory / name, found) from failure
    for record in records:
        if record is not None and record.ends is not None and record.has(name, text):
            ends.put_back(state, record.ends.get(name, []))
    return state


def _damaged(path: Any, found: str) -> ValueError:
    return ValueError(
        f"{path}: a saved state must be JSON, found {found}: the file was cut or overwritten; "
        "restore an earlier checkpoint"
    )


@dataclasses.dataclass
class Found:
    """What a checkpoint has for an iterator.

    Attributes:
        source: The file, for messages.
        state: The state of the iterator as JSON, if that is used.
        shard_states: The states of its datasets otherwise.
        record: What was written with it, if known.
    """

    source: str
    state: Any = None
    shard_states: dict[int, Any] | None = None
    record: _Record | None = None


def find(directory: Any, item: Any) -> Found:
    """Reads what `directory` has for `item`; does not change `item`.

    Raises:
        ValueError: A file is missing, or belongs to another checkpoint.
    """
    index, count = files.process_index_and_count()
    name = files.state_file(index, count)
    options = getattr(item, "shard_options", None)
    if options is not None and hasattr(item, "get_shard_states"):
        return _find_elastic(directory, item, name, options)
    text = _text(directory, name)
    if text is None:
        _refuse_missing(directory, name)
    record = _record_of(directory, index, count, text)
    state = _parsed(directory, name, text, item, [record])
    return Found(str(directory / name), state, record=record)


def _refuse_missing(directory: Any, name: str, why: str = "") -> NoReturn:
    raise ValueError(f"File {directory / name} does not exist.{why}")


def _record_of(directory: Any, index: int, count: int, text: str) -> _Record | None:
    """The record written with the state `text` of a process."""
    record = _Record.read(directory, files.record_file(index, count))
    return record if record and record.has(files.state_file(index, count), text) else None


# --- elastic iterators --------------------------------------------------------------------------


def _find_elastic(directory: Any, item: Any, name: str, options: Any) -> Found:
    """As `find`, where the number of processes may have changed since the state was saved."""
    index, count = files.process_index_and_count()
    saved_count, records = _latest(directory)
    text = _text(directory, name) if saved_count in {0, count} else None
    if text is not None:
        record = records.get(index)
        own = [options.shard_index, options.shard_count]
        if record is None or record.shard in (None, own):
            state = _parsed(directory, name, text, item, [record])
            return Found(str(directory / name), state, record=record)
    elif saved_count in {0, count}:
        _refuse_missing(directory, name)
    needed = _shard_states(item)
    if needed is None:
        if text is not None:
            record = records.get(index)
            state = _parsed(directory, name, text, item, [record])
            return Found(str(directory / name), state, record=record)
        return _any_state(directory, item, saved_count, records)
    return _find_shards(directory, item, sorted(map(int, needed)), saved_count, records)


def _latest(directory: Any) -> tuple[int, dict[int, _Record]]:
    """The number of processes that wrote the checkpoint, and their records by process.

    Raises:
        ValueError: There are files of several numbers of processes, and nothing says which of them
            were written last.
    """
    by_count: dict[int, dict[int, str]] = {}
    for path in directory.glob("process_*-of-*.json"):
        if matched := _PROCESS_FILE.fullmatch(os.path.basename(os.fspath(path))):  # noqa: PTH119
            by_count.setdefault(int(matched[2]), {})[int(matched[1])] = matched[0]
    found: dict[int, dict[int, _Record]] = {}
    for count, names in by_count.items():
        found[count] = {}
        for index in names:
            record = _record_of(directory, index, count, _text(directory, names[index]) or "")
            if record is not None:
                found[count][index] = record
    if len(found) > 1 and not all(found.values()):
        counts = sorted(found)
        unknown = [
            name for count in counts if not found[count] for name in by_count[count].values()
        ]
        raise ValueError(
            f"{directory} has states of {' and of '.join(map(str, counts))} processes, and nothing "
            f"says whether {', '.join(sorted(unknown))} belong to the others; delete the files of "
            "the earlier checkpoint"
        )
    if not found:
        return 0, {}
    latest = max(
        found,
        key=lambda count: (max((r.time for r in found[count].values()), default=0.0), count),
    )
    missing = [i for i in range(latest) if i not in by_count[latest]]
    if missing:
        _refuse_missing(
            directory,
            files.state_file(missing[0], latest),
            f" The checkpoint was written by {latest} processes, so it is incomplete.",
        )
    return latest, found[latest]


_PROCESS_FILE = re.compile(r"process_(\d+)-of-(\d+)\.json")


def _any_state(directory: Any, item: Any, count: int, records: dict[int, _Record]) -> Found:
    """The state of any process; they are equal where each has taken as many steps."""
    first = files.state_file(0, count)
    found = Found(str(directory / first), record=records.get(0))
    for index in range(count):
        name = files.state_file(index, count)
        text = _text(directory, name)
        if text is None:
            _refuse_missing(directory, name)
        state = _parsed(directory, name, text, item, [records.get(index)])
        if index == 0:
            found.state = state
        elif state != found.state:
            raise ValueError(
                f"{directory}: {first} and {name} have different states, so the processes had not "
                "taken equally many steps; another number of processes cannot continue from it"
            )
    return found


def _find_shards(
    directory: Any, item: Any, shards: list[int], count: int, records: dict[int, _Record]
) -> Found:
    """The states of the datasets of this process, which other processes have saved."""
    options = item.shard_options
    if len(records) < count:
        records = {}  # Grain has written some of it
    states = {}
    for shard in shards:
        name = files.shard_file(shard)
        text = _text(directory, name)
        if text is None:
            _refuse_missing(directory, name)
        if records and not any(record.has(name, text) for record in records.values()):
            raise ValueError(
                f"File {directory / name} was not written with the states of the {count} processes "
                "beside it: it is left from another checkpoint, or was changed"
            )
        states[shard] = _parsed(directory, name, text, item, records.values())
    last = shards[-1] if shards else options.shard_index - options.shard_count
    beyond = files.shard_file(last + options.shard_count)
    text = _text(directory, beyond)
    if text is not None and (not records or any(r.has(beyond, text) for r in records.values())):
        raise ValueError(
            f"File {directory / beyond} belongs to a dataset that the pipeline does not have: it "
            "was saved with more datasets, or is left from another checkpoint"
        )
    record = next(iter(records.values()), None)
    return Found(str(directory), shard_states=states, record=record)


# --- restoring ----------------------------------------------------------------------------------


def apply(found: Found, item: Any, *, check_pipeline: bool = True) -> None:
    """Makes `item` continue from what `find` returned.

    Raises:
        ValueError: The state was saved from another pipeline, or does not fit.
    """
    if check_pipeline and os.environ.get(RESTORE_ANYWAY, "0") in {"", "0"}:
        _check_pipeline(found, item)
    if found.shard_states is not None:
        item.set_shard_states(found.shard_states)
        return
    try:
        item.set_state(found.state)
    except ValueError as failure:
        failure.add_note(f"the state is from {found.source}")
        raise


def _check_pipeline(found: Found, item: Any) -> None:
    if found.record is None or found.record.pipeline is None:
        return
    now = described(item)
    if now is None:
        return
    saved_states = [found.state] if found.shard_states is None else found.shard_states.values()
    # Compared as JSON, which has no tuples.
    refused, accepted = changes.compared(
        found.record.pipeline,
        json.loads(json.dumps(now)),
        list(saved_states),
        pipeline.nodes_in(now),
        say_ends=found.record.ends is not None,
    )
    if refused:
        raise ValueError(
            f"{found.source}: the state was saved from another pipeline: "
            f"{pipeline.reported(refused)}. Restore it into the pipeline that saved it; to use "
            f"it in this one, set the environment variable {RESTORE_ANYWAY}=1"
        )
    if accepted:
        _LOG.warning(
            "%s: the pipeline has changed since the state was saved, and continues from it: %s",
            found.source,
            "; ".join(accepted),
        )


def _has_dicts(item: Any) -> bool:
    """Whether the states of `item` are dicts, not bytes as those of a `DataLoader`."""
    is_dict: bool | None = getattr(item, "_STATE_IS_DICT", None)
    return not isinstance(item.get_state(), bytes) if is_dict is None else is_dict


_LOG = logging.getLogger("grainmill")


# --- asynchronously, for Orbax ------------------------------------------------------------------


async def save(item: Any, directory: Any) -> Awaitable[None]:
    """Returns a coroutine that writes the state that `item` has now into `directory`."""
    return _write_in_thread(directory, files_of(item))


async def _write_in_thread(directory: Any, texts: Mapping[str, str]) -> None:
    import asyncio  # noqa: PLC0415

    create = getattr(directory, "await_creation", None)
    if create is not None:
        directory = await create()
    await asyncio.to_thread(write_all, directory, texts)


async def load(item: Any, directory: Any) -> Awaitable[None]:
    """Returns a coroutine that makes `item` continue from the state in `directory`."""
    return _load_in_thread(item, directory)


async def _load_in_thread(item: Any, directory: Any) -> None:
    import asyncio  # noqa: PLC0415

    found = await asyncio.to_thread(find, directory, item)
    apply(found, item)
