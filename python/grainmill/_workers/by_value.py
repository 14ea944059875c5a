"""Pickles what another process runs: functions and classes of the main script by value.

`cloudpickle` does so for plain functions and classes. Cached functions, among others, it names,
and no other process can import the main script.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import sys
import types
from typing import TYPE_CHECKING, Any

import cloudpickle

from grainmill._workers.main_classes import MAIN, MAIN_OF_CHILD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PROTOCOL = 5
_MAX_DEPTH = 30
_MAX_TRIED = 2_000
_MAINS = (MAIN, MAIN_OF_CHILD)
_CachedFunction = type(functools.cache(len))
# Objects of these packages are named as they are, not by what is inside of them.
_LEAVES = {*sys.stdlib_module_names, "absl"} - {MAIN}
_BY_REFERENCE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler of `cloudpickle` that names nothing of the main script."""

    def reducer_override(self, value: Any) -> Any:
        """See `pickle.Pickler.reducer_override`."""
        kind = type(value)
        if kind is _CachedFunction:
            if not _is_importable(value):
                return _cached, (value.__wrapped__, value.cache_parameters())
        elif kind is functools.cached_property:  # it may hold a lock
            return _property, (value.func, value.attrname)
        elif kind is functools.singledispatchmethod:  # since 3.13 it has weak references
            return _dispatched_method, (value.func, value.dispatcher)
        elif kind is types.CodeType:
            return _code, (value.co_filename, *self.dispatch_table[kind](value))
        elif kind is types.FunctionType:
            registry = vars(value).get("registry")
            if isinstance(registry, types.MappingProxyType) and not _is_importable(value):
                return _dispatched, (registry[object], dict(registry))
        elif kind is types.ModuleType and value.__name__ in _MAINS:
            raise pickle.PicklingError(
                "cannot pickle the module of the main script, which workers cannot import"
            )
        elif (
            getattr(value, "__module__", None) in _MAINS
            and _is_sent_by_name(value)
            and kind not in self.dispatch_table
        ):
            raise pickle.PicklingError(
                f"cannot pickle `{value.__qualname__}` of the main script: objects of type "
                f"`{_kind_name(kind)}` are sent by name, and workers cannot import that "
                "script; define it in a module that they can import"
            )
        return super().reducer_override(value)


def dumps(
    value: Any, buffer_callback: Callable[[pickle.PickleBuffer], None] | None = None
) -> bytes:
    """Pickles a value for a process that cannot import the main script, as worker processes get it.

    Functions and classes of the main script are sent as they are, not by their names; `cloudpickle`
    does so for plain ones, and this also for those that are cached. `pickle.loads` returns the
    value.

    Args:
        value: A dataset, a function, or any other object.
        buffer_callback: As for `pickle.dumps`.

    Returns:
        The pickle.

    Raises:
        Exception: It cannot be pickled; with a note that names what of it cannot.

    Example:
        >>> import pickle
        >>> from grainmill import pipelines
        >>> pickle.loads(pipelines.dumps(lambda x: x * 10))(2)
        20
    """
    if MAIN_OF_CHILD in sys.modules:  # another process cannot import this module either
        cloudpickle.register_pickle_by_value(sys.modules[MAIN_OF_CHILD])
    file = io.BytesIO()
    try:
        Pickler(file, protocol=_PROTOCOL, buffer_callback=buffer_callback).dump(value)
    except Exception as failure:
        culprit = _culprit(value)
        if culprit:
            failure.add_note(culprit)
        raise
    return file.getvalue()


def _is_importable(function: Any) -> bool:
    """Whether another process finds a function by its module and name."""
    module = getattr(function, "__module__", None)
    names = {MAIN, MAIN_OF_CHILD, *cloudpickle.list_registry_pickle_by_value()}
    if not isinstance(module, str) or not names.isdisjoint(_packages(module)):
        return False
    found: Any = sys.modules.get(module)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _packages(module: str) -> Iterator[str]:
    """A module and the packages that it is in."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def _is_sent_by_name(value: Any) -> bool:
    """Whether a pickle of `value` would be a name in the main script."""
    try:
        is_named = isinstance(value.__qualname__, str)
    except Exception:  # it has none, or refuses to be asked
        return False
    if not is_named or isinstance(value, _BY_REFERENCE):
        return False
    try:
        return isinstance(value.__reduce_ex__(_PROTOCOL), str)
    except Exception:  # the pickler raises it, unless it has another way
        return False


def _code(filename: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> types.CodeType:
    """A code object with its own file, which `cloudpickle` leaves out, for tracebacks."""
    code: types.CodeType = make(*arguments)
    return code.replace(co_filename=filename)


def _cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _property(function: Any, name: str | None) -> Any:
    found = functools.cached_property(function)
    if name is not None:
        found.__set_name__(object, name)
    return found


def _dispatched(function: Any, registry: dict[type, Any]) -> Any:
    found = functools.singledispatch(function)
    for kind, implementation in registry.items():
        if kind is not object:
            found.register(kind, implementation)
    return found


def _dispatched_method(function: Any, dispatcher: Any) -> Any:
    found = functools.singledispatchmethod(function)
    found.dispatcher = dispatcher
    return found


# --- what cannot be sent ------------------------------------------------------------------------


def _culprit(value: Any) -> str:
    """Which function refers to what cannot be pickled, and what can be done; empty if unknown."""
    path: list[str] = []
    seen: set[int] = set()
    while len(path) < _MAX_DEPTH:
        for name, child in _children(value):
            if id(child) not in seen and len(seen) < _MAX_TRIED and not _is_picklable(child):
                seen.add(id(child))
                value = child
                if name and (path or not name.startswith("`[")):  # where the package keeps it
                    path.append(name)
                break
            seen.add(id(child))
        else:
            break
    if not path:
        return ""
    return (
        f"{' -> '.join(path)} is of type `{_kind_name(type(value))}`, which cannot be sent to "
        f"another process: {_hint(value)}"
    )


def _is_picklable(value: Any) -> bool:
    try:
        Pickler(io.BytesIO(), protocol=_PROTOCOL, buffer_callback=lambda _: False).dump(value)
    except RecursionError:
        return True
    except Exception:
        return False
    return True


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value consists of, and what messages call each; empty where it is of the package."""
    if isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, types.MethodType):
        yield "", value.__func__
        yield f"`self` of `{value.__qualname__}`", value.__self__
    elif isinstance(value, functools.partial):
        yield "", value.func
        is_own = getattr(value.func, "__module__", "").startswith("grainmill.")
        for child in (*value.args, *value.keywords.values()):
            yield "" if is_own else f"an argument of `partial({_shown(value.func)})`", child
    elif isinstance(value, _CachedFunction):
        yield "", value.__wrapped__
    elif isinstance(value, dict):
        for key, child in list(value.items()):
            yield f"`[{key!r}]`", child
    elif isinstance(value, list | tuple | set | frozenset):
        for number, child in enumerate(value):
            yield f"`[{number}]`", child
    else:
        yield from _of_object(value)


def _of_object(value: Any) -> Iterator[tuple[str, Any]]:
    owner = value if isinstance(value, type) else type(value)
    if not isinstance(value, type) and not _is_picklable(owner):
        yield "", owner
    if owner.__module__.partition(".")[0] in _LEAVES:
        return
    is_own = owner.__module__.startswith("grainmill.")
    try:
        attributes = list(vars(value).items())
    except TypeError:
        return
    for name, child in attributes:
        if name in {"__dict__", "__weakref__"}:
            continue
        yield "" if is_own else f"`{name}` of `{owner.__qualname__}`", child


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    where = (
        f"`{function.__qualname__}` at {os.path.basename(code.co_filename)}:{code.co_firstlineno}"  # noqa: PTH119
    )
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"variable `{name}` of {where}", cell.cell_contents
        except ValueError:  # it is not set yet
            continue
    for name in sorted(_names_in(code)):
        if name in function.__globals__:
            yield f"global `{name}` of {where}", function.__globals__[name]
    for child in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield f"a default of {where}", child
    for name, child in vars(function).items():
        yield "" if name == "__wrapped__" else f"`{name}` of {where}", child


def _names_in(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names


def _kind_name(kind: type) -> str:
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _shown(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _hint(value: Any) -> str:
    if type(value).__name__ == "FlagValues":
        return "read the flag before, and use its value in the function"
    if isinstance(value, types.GeneratorType):
        return "use a list, or a function that makes the generator"
    return (
        "make it in the worker, in a function with `functools.cache` or in `worker_init_fn`, or "
        "leave it out of the object in `__getstate__`"
    )
