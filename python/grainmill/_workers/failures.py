"""Exceptions on their way from a worker: rebuilt as they were, or told by a `WorkerError`."""

from __future__ import annotations

import contextlib
import signal
import traceback
from typing import TYPE_CHECKING, Any, TypeAlias

from grainmill._native import GrainmillError
from grainmill._plan.notes import notes_of, set_notes
from grainmill._plan.tracebacks import drop_inner_frames
from grainmill._workers.messages import dumps, loads

if TYPE_CHECKING:
    from collections.abc import Callable

SerializedException: TypeAlias = "dict[str, Any]"

_LONGEST_CHAIN = 16


class WorkerError(GrainmillError):
    """A failure in a worker process that cannot be reported by an exception of its own.

    It is raised where a worker ends by itself, takes longer than `timeout_s`, or raises an
    exception that cannot be pickled. Other exceptions come out as themselves.
    """


def serialized(failure: BaseException, links: int = _LONGEST_CHAIN) -> SerializedException:
    """All about `failure` that can cross to another process, its chain included."""
    drop_inner_frames(failure)
    # One that was never raised itself has its place in its cause.
    chain = failure.__traceback__ is None
    text = traceback.TracebackException.from_exception(failure)
    text.__notes__ = None  # they cross as they are
    told: SerializedException = {
        "text": "".join(text.format(chain=chain)),
        "summary": "".join(text.format_exception_only()).strip(),
        "notes": [note for note in notes_of(failure) if isinstance(note, str)],
        "way": _way(failure),
        "suppress": failure.__suppress_context__,
    }
    for name in ("__cause__", "__context__"):
        link = getattr(failure, name)
        told[name] = serialized(link, links - 1) if link is not None and links else None
    return told


def _way(failure: BaseException) -> tuple[str, bytes] | None:
    """How to make `failure` again with the same type and text, if there is a way."""
    for name, state in (("pickle", lambda: failure), ("parts", lambda: _parts(failure))):
        with contextlib.suppress(BaseException):
            data = dumps(state())
            again = _REBUILD[name](data)
            if type(again) is type(failure) and str(again) == str(failure):
                return name, data
    return None


def _parts(failure: BaseException) -> tuple[type, tuple[Any, ...], dict[str, Any]]:
    """The class, the arguments and what else can be pickled of the attributes."""
    kept = {}
    for name, value in vars(failure).items():
        with contextlib.suppress(Exception):
            dumps(value)
            kept[name] = value
    return type(failure), tuple(_sendable(argument) for argument in failure.args), kept


def _sendable(argument: Any) -> Any:
    try:
        dumps(argument)
    except Exception:
        return repr(argument)
    return argument


def _from_parts(data: bytes) -> BaseException:
    kind, arguments, attributes = loads(data)
    made: BaseException = kind.__new__(kind, *arguments)
    BaseException.__setattr__(made, "args", arguments)
    vars(made).update(attributes)
    return made


_REBUILD: dict[str, Callable[[bytes], BaseException]] = {"pickle": loads, "parts": _from_parts}


def deserialized(told: SerializedException, where: str) -> BaseException:
    """The exception that `serialized` was given, with a note on where it was raised."""
    failure = _chained(told, where)
    set_notes(failure, [*notes_of(failure), f"{where}:\n{told['text'].rstrip()}"])
    return failure


def _chained(told: SerializedException, where: str) -> BaseException:
    failure = _alone(told, where)
    # Past what its class says of assignments, which may be that there are none.
    assign = BaseException.__setattr__
    for name in ("__cause__", "__context__"):
        if told[name] is not None:
            assign(failure, name, _chained(told[name], "in a worker"))
    assign(failure, "__suppress_context__", told["suppress"])
    if told["notes"]:
        set_notes(failure, told["notes"])
    return failure


def _alone(told: SerializedException, where: str) -> BaseException:
    if told["way"] is not None:
        name, data = told["way"]
        with contextlib.suppress(Exception):
            return _REBUILD[name](data)
    return WorkerError(f"{where}: {told['summary']}")


def worker_ended(worker: int, code: int | None, doing: str) -> WorkerError:
    """What is raised where a worker has ended by itself; negative codes are signals."""
    if code is None:
        how = "is gone with the process that started it"
    elif code < 0:
        how = f"was killed by {_signal_name(-code)}"
    else:
        how = f"left with exit code {code}"
    return WorkerError(
        f"worker {worker} {how} {doing}: Worker process was terminated unexpectedly with exit "
        f"code {code}. Search the logs above for the source of the crash."
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
