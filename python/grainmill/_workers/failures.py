"""Exceptions sent from a worker: rebuilt with their type, or reported by a `WorkerError`."""

from __future__ import annotations

import contextlib
import signal
import traceback
from typing import TYPE_CHECKING, Any, TypeAlias

from grainmill._native import GrainmillError
from grainmill._plan.notes import notes_of, set_notes
from grainmill._plan.tracebacks import drop_inner_frames
from grainmill._workers.frames import frames_of, traceback_of
from grainmill._workers.messages import dumps, loads

if TYPE_CHECKING:
    from collections.abc import Callable

SerializedException: TypeAlias = "dict[str, Any]"

_MAX_CHAIN_LEN = 16


class WorkerError(GrainmillError):
    """A failure in a worker process that cannot be reported by the exception raised there.

    It is raised if a worker exits by itself, takes longer than `timeout_s`, or raises an exception
    that cannot be pickled. Other exceptions are raised as they are.
    """


def serialized(failure: BaseException, max_links: int = _MAX_CHAIN_LEN) -> SerializedException:
    """What can be sent of `failure` to another process: text, frames, notes, causes, its pickle."""
    drop_inner_frames(failure)
    # An exception that was never raised has no traceback of its own, but its cause may have one.
    chain = failure.__traceback__ is None
    text = traceback.TracebackException.from_exception(failure)
    text.__notes__ = None  # they are sent separately
    data: SerializedException = {
        "text": "".join(text.format(chain=chain)),
        "summary": "".join(text.format_exception_only()).strip(),
        "notes": [note for note in notes_of(failure) if isinstance(note, str)],
        "frames": frames_of(failure.__traceback__),
        "pickled": _pickled(failure),
        "suppress": failure.__suppress_context__,
    }
    for name in ("__cause__", "__context__"):
        link = getattr(failure, name)
        data[name] = serialized(link, max_links - 1) if link is not None and max_links else None
    return data


def _pickled(failure: BaseException) -> tuple[str, bytes] | None:
    """The method and the bytes that rebuild `failure` with the same type and text, if any do."""
    for method, state in (("pickle", lambda: failure), ("parts", lambda: _parts(failure))):
        with contextlib.suppress(BaseException):
            pickled = dumps(state())
            rebuilt = _REBUILD[method](pickled)
            if type(rebuilt) is type(failure) and str(rebuilt) == str(failure):
                return method, pickled
    return None


def _parts(failure: BaseException) -> tuple[type, tuple[Any, ...], dict[str, Any]]:
    """The class, the arguments, and the attributes that can be pickled."""
    attributes = {}
    for name, value in vars(failure).items():
        with contextlib.suppress(Exception):
            dumps(value)
            attributes[name] = value
    return type(failure), tuple(_sendable(argument) for argument in failure.args), attributes


def _sendable(argument: Any) -> Any:
    try:
        dumps(argument)
    except Exception:
        return repr(argument)
    return argument


def _from_parts(data: bytes) -> BaseException:
    kind, arguments, attributes = loads(data)
    failure: BaseException = kind.__new__(kind, *arguments)
    BaseException.__setattr__(failure, "args", arguments)
    vars(failure).update(attributes)
    return failure


_REBUILD: dict[str, Callable[[bytes], BaseException]] = {"pickle": loads, "parts": _from_parts}


def deserialized(data: SerializedException, where: str) -> BaseException:
    """The exception that `serialized` took, with its traceback and a note on its worker."""
    failure = _rebuilt_chain(data, where)
    set_notes(failure, [*notes_of(failure), f"{where}:\n{data['text'].rstrip()}"])
    return failure


def _rebuilt_chain(data: SerializedException, where: str) -> BaseException:
    failure = _rebuilt(data, where)
    assign = BaseException.__setattr__  # the class may forbid assignments
    with contextlib.suppress(Exception):  # the failure matters more than its traceback
        BaseException.with_traceback(failure, traceback_of(data["frames"]))
    for name in ("__cause__", "__context__"):
        if data[name] is not None:
            assign(failure, name, _rebuilt_chain(data[name], "in a worker"))
    assign(failure, "__suppress_context__", data["suppress"])
    if data["notes"]:
        set_notes(failure, data["notes"])
    return failure


def _rebuilt(data: SerializedException, where: str) -> BaseException:
    if data["pickled"] is not None:
        method, pickled = data["pickled"]
        with contextlib.suppress(Exception):
            return _REBUILD[method](pickled)
    return WorkerError(f"{where}: {data['summary']}")


def worker_exited(
    worker: int, code: int | None, activity: str, starter_code: int | None = None
) -> WorkerError:
    """The error for a worker that exited by itself; negative codes are signals.

    Args:
        worker: The worker.
        code: Its exit code; `None` if it exited with the process that started it.
        activity: What it was doing.
        starter_code: The exit code of that process, if it is known.
    """
    if code is not None:
        how = _how_exited(code)
    else:
        how = "exited with the process that started it"
        how += "" if starter_code is None else f", which {_how_exited(starter_code)},"
    return WorkerError(
        f"worker {worker} {how} {activity}: Worker process was terminated unexpectedly with exit "
        f"code {code}. Search the logs above for the source of the crash. No element is lost: the "
        "next call of `next` starts workers again and continues."
    )


def _how_exited(code: int) -> str:
    return f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with exit code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
