"""What made the elements of a cache: a description of the plan, and digests of its code and files.

Other than the description in a checkpoint, it has whatever determines the elements, as far as that
can be seen: bytecode, constants, closures, defaults and the globals that functions refer to; the
attributes of objects; the size and modification time of files, and the tags of objects in buckets.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import site
import sys
import sysconfig
import types
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from grainmill import _native
from grainmill._checkpoint import pipeline
from grainmill._plan import random_access
from grainmill._url import identified, is_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from grainmill._plan.node import Node

# Raised whenever files of a cache or what a fingerprint covers changes.
_FORMAT: Final = 1

# They change how fast elements are computed, not the elements.
_LEFT_OUT: Final = {"added_at", "options", "with_parents", "store", "dataset", "source", "parents"}


class Fingerprint(NamedTuple):
    """What made the elements of a cache, as it is written beside them.

    Attributes:
        digest: Differs between different pipelines; a name in a file system.
        stages: The description of the plan, see `_checkpoint.pipeline`.
        code: The name of each stage with the digest of its functions, objects and files.
        is_private: Whether some elements are of objects in buckets or on servers, which others who
            use this machine may not be allowed to read.
    """

    digest: str
    stages: pipeline.Stages
    code: list[list[str]]
    is_private: bool = False

    @classmethod
    def of(cls, node: Node, kind: str) -> Fingerprint:
        """The fingerprint of the elements of the plan that ends in `node`.

        Args:
            node: The plan.
            kind: What kind of cache it is for.
        """
        stages = pipeline.described(node)
        code = [[_name(step), _digest_of(step)] for step in node.walk_up()]
        text = json.dumps([_FORMAT, kind, stages, code], sort_keys=True)
        is_private = any(_is_far(step) for step in node.walk_up())
        return cls(hashlib.sha256(text.encode()).hexdigest()[:24], stages, code, is_private)

    def share(self, worker: int, count: int) -> Fingerprint:
        """The fingerprint of the share of one of several workers."""
        if count == 1:
            return self
        text = f"{self.digest} {worker} of {count}"
        return self._replace(digest=hashlib.sha256(text.encode()).hexdigest()[:24])

    def differences(self, stages: Any, code: Any) -> list[str]:
        """What differs from a pipeline with these `stages` and `code`, as texts."""
        found = pipeline.differences(stages, self.stages)
        if found or not isinstance(code, list):
            return found
        for before, now in zip(code, self.code, strict=False):
            if before != now:
                found.append(f"the functions, values or files of {now[0]} have changed")
        return found or ["it is another worker's share, or another kind of cache"]


def _is_far(node: Node) -> bool:
    dataset = getattr(node, "source", getattr(node, "dataset", None))
    paths = getattr(dataset, "paths", getattr(dataset, "_paths", None))
    paths = paths if isinstance(paths, list | tuple) else [paths]
    return any(isinstance(path, str) and is_url(path) for path in paths)


def _name(node: Node) -> str:
    return node.dataset_name or str(node).partition("(")[0]


def _digest_of(node: Node) -> str:
    """The digest of what the plan's description leaves out of one stage."""
    hasher = _Hasher()
    hasher.add(type(node).__name__)
    for field in dataclasses.fields(node):
        if field.name not in _LEFT_OUT:
            hasher.add(field.name)
            hasher.add(getattr(node, field.name))
    if isinstance(node, random_access.Source):
        hasher.add_source(node.source)
    if node.users_dataset is not None:
        hasher.add(type(node.users_dataset))
        # Its parents are stages of their own.
        own = {k: v for k, v in vars(node.users_dataset).items() if not hasattr(v, "_plan_node")}
        hasher.add({name: value for name, value in own.items() if name != "_parents"})
    return hasher.digest()


class _Hasher:
    """A digest of values of any kind, equal for equal values in other processes."""

    def __init__(self, known: dict[int, tuple[bytes, Any]] | None = None) -> None:
        self._hash = hashlib.blake2b(digest_size=12)
        # The digests of values by `id`, with the values, so that it stays theirs. Whether two
        # places hold one object or two equal ones may differ between processes, and does not count.
        self._known: dict[int, tuple[bytes, Any]] = {} if known is None else known

    def digest(self) -> str:
        return self._hash.hexdigest()

    def _text(self, *texts: str) -> None:
        for text in texts:
            data = text.encode("utf-8", "surrogatepass")
            self._hash.update(b"%d:" % len(data) + data)

    def add(self, value: Any) -> None:
        """Takes in a value."""
        if type(value) in _PLAIN:
            self._text(type(value).__name__, repr(value))
            return
        if isinstance(value, bytes | bytearray | memoryview):
            self._text(type(value).__name__, str(len(value)))
            self._hash.update(value)
            return
        if id(value) not in self._known:
            self._known[id(value)] = (b"part of itself", value)
            inner = _Hasher(self._known)
            inner._add_compound(value)
            self._known[id(value)] = (inner._hash.digest(), value)
        self._hash.update(self._known[id(value)][0])

    def _add_compound(self, value: Any) -> None:  # noqa: PLR0912 - one case for each kind
        match value:
            case np.ndarray() if value.dtype != object:
                self._text("array", str(value.dtype), str(value.shape))
                self._hash.update(np.ascontiguousarray(value).tobytes())
            case tuple() | list() if type(value) in {tuple, list}:
                self._text(type(value).__name__, str(len(value)))
                for item in value:
                    self.add(item)
            case dict() if type(value) is dict:
                self._text("dict", str(len(value)))
                for key, item in value.items():
                    self.add(key)
                    self.add(item)
            case set() | frozenset():
                self._text("set", *sorted(_digest(item) for item in value))
            case types.FunctionType():
                self._function(value)
            case types.MethodType():
                self._text("method")
                self.add(value.__func__)
                self.add(value.__self__)
            case types.CodeType():
                self._code(value)
            case types.ModuleType():
                self._text("module", value.__name__, str(getattr(value, "__version__", "")))
            case type():
                self._class(value)
            case types.BuiltinFunctionType():
                self._text("builtin", str(value.__module__), value.__qualname__)
            case functools.partial():
                self._text("partial")
                self.add([value.func, value.args, value.keywords])
            case _:
                self._object(value)

    def add_source(self, source: Any) -> None:
        """Takes in a source: its text and its files, or what it consists of."""
        is_ours = type(source).__module__.startswith("grainmill")
        if is_ours:
            self._text(repr(source))
        paths = getattr(source, "paths", None)
        if isinstance(paths, list | tuple) and all(isinstance(p, str | os.PathLike) for p in paths):
            if not is_ours:
                self.add(type(source))
            ranges = getattr(source, "_sources", None)
            self.add([] if ranges is None else [tuple(each)[1:2] for each in ranges])
            self.add(len(source))
            names = [os.fspath(path) for path in paths]
            for name in names:
                self._file(name)
            if is_ours:  # other packages may know other services
                self.add(_native.object_identities([name for name in names if is_url(name)]))
        elif not is_ours:
            self.add(source)

    def _file(self, path: str) -> None:
        name = os.path.basename(path)  # noqa: PTH119 - for many files, a `Path` takes long
        try:
            found = os.stat(path)  # noqa: PTH116
        except (OSError, ValueError):  # far away, or with a range of records in its name
            self._text(identified(path))
        else:
            self._text(name, str(found.st_size), str(found.st_mtime_ns))

    def _function(self, function: types.FunctionType) -> None:
        self._text("function", function.__qualname__)
        if _is_installed(function.__module__, function.__code__.co_filename):
            # Of an installed package: its version says as much, and its code refers to all of it.
            self._text(function.__module__, _version(function.__module__))
            self.add(function.__defaults__)
        else:
            self._code(function.__code__)
            self.add(function.__defaults__)
            self.add(function.__kwdefaults__)
            names = set(_names(function.__code__))
            used = {n: function.__globals__[n] for n in names if n in function.__globals__}
            for name in sorted(used):
                self._text(name)
                self.add(used[name])
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:  # not assigned yet
                self._text("empty cell")

    def _code(self, code: types.CodeType) -> None:
        self._text("code", ".".join(map(str, sys.version_info[:2])))
        self._hash.update(code.co_code)
        for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
            self._text(*names)
        for constant in code.co_consts:
            self.add(constant)

    def _class(self, kind: type) -> None:
        self._text("class", kind.__module__, kind.__qualname__)
        where = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
        if kind.__module__ == "builtins" or _is_installed(kind.__module__, where):
            self._text(_version(kind.__module__))
            return
        for base in kind.__bases__:
            self.add(base)
        for name in sorted(vars(kind)):
            value = vars(kind)[name]
            if name in _CLASS_NAMES_LEFT_OUT:
                continue
            self._text(name)
            match value:
                case staticmethod() | classmethod():
                    self.add(value.__func__)
                case property():
                    self.add([value.fget, value.fset])
                case functools.cached_property():
                    self.add(value.func)
                case types.MemberDescriptorType() | types.GetSetDescriptorType():
                    pass
                case _:
                    self.add(value)

    def _object(self, value: Any) -> None:
        """An object as `pickle` sees it; if it does not, its class and attributes."""
        self.add(type(value))
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:
            self.add(getattr(value, "__dict__", None))
            return
        if isinstance(reduced, str):
            self._text(reduced)
            return
        function, arguments, *rest = reduced
        self._text(str(getattr(function, "__qualname__", "")))
        self.add(tuple(arguments))
        for part in rest[:1]:
            self.add(part)
        for items in rest[1:3]:
            self.add(None if items is None else list(items))


def _digest(value: Any) -> str:
    hasher = _Hasher()
    hasher.add(value)
    return hasher.digest()


_PLAIN: Final = {type(None), bool, int, float, complex, str}
_CLASS_NAMES_LEFT_OUT: Final = {
    *("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__firstlineno__"),
    *("__static_attributes__", "__annotations__", "__annotate__", "__annotate_func__"),
    *("__annotations_cache__", "__parameters__", "__orig_bases__", "__slotnames__"),
    *("__abstractmethods__", "_abc_impl", "__match_args__", "__type_params__"),
}


def _names(code: types.CodeType) -> Iterator[str]:
    """The names that code, and functions in it, may look up among the globals."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


@functools.cache
def _installed_at() -> tuple[str, ...]:
    """The directories of the standard library and of installed packages."""
    found = [sysconfig.get_paths().get(name, "") for name in ("stdlib", "platlib", "purelib")]
    find: Callable[[], list[str]] | None = getattr(site, "getsitepackages", None)
    if find is not None:
        found += find()
    return tuple(os.path.join(path, "") for path in found if path)  # noqa: PTH118


def _is_installed(module: str | None, file: str) -> bool:
    """Whether code is of the standard library or an installed package, not of the user."""
    package = (module or "").partition(".")[0]
    return package in {"grainmill", "builtins"} or file.startswith(("<frozen", *_installed_at()))


def _version(module: str | None) -> str:
    package = sys.modules.get((module or "").partition(".")[0])
    return str(getattr(package, "__version__", ""))
