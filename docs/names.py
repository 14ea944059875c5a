"""Writes `names.md`: every public name of Grain 0.2.18 beside that of grainmill.

`python docs/names.py` writes the file; both packages must be installed. A test compares it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from types import ModuleType

PAGE = Path(__file__).with_suffix(".md")
MODULES = [  # those with the older names last
    "grain",
    "grain.sources",
    "grain.transforms",
    "grain.samplers",
    "grain.sharding",
    "grain.experimental",
    "grain.multiprocessing",
    "grain.checkpoint",
    "grain.constants",
    "grain.python",
    "grain.python.experimental",
]
INTRODUCTION = """\
# Names

<!-- Written by docs/names.py. -->

Every public name of Grain 0.2.18, compared with that of grainmill. "Same" means the same name in
the same module, and, for classes and functions, that every argument can be passed as in Grain, with
the same default; members of a class are listed where that is not so.
[Switching from Grain](switching.md) has the differences in behaviour.
"""
PRIVATE = """
## Private modules

Names below `grain._src` that programs import. They are there under
`grainmill.install_as_grain()` and `python -m grainmill.as_grain`, and are the same objects.
"""
# Why something is not the same, by Grain's name.
WHY = {
    "grain.__version__": "each package has a version of its own",
    "grain.__version_info__": "each package has a version of its own",
    "grain.experimental.TFRecordIterDataset": "comes with the file formats",
}
_NO_VALUE, _BY_NAME = inspect.Parameter.empty, inspect.Parameter.KEYWORD_ONLY
_BY_PYTHON = {"__init__", "__new__", "__repr__", "__eq__", "__hash__", "__class_getitem__"}


class Row(NamedTuple):
    """A line of the table."""

    grain: str
    ours: str
    result: str


def rows_of(module: str, seen: dict[int, str]) -> list[Row]:
    """The names in a public module of Grain; `seen` has the first place of each object."""
    theirs = importlib.import_module(module)
    try:
        ours: ModuleType | None = importlib.import_module(_own(module))
    except ModuleNotFoundError:
        ours = None
    rows = []
    for name in _public_names(theirs):
        place = f"{module}.{name}"
        value = getattr(theirs, name)
        first = seen.setdefault(id(value), place) if _is_class_or_function(value) else place
        if not hasattr(ours, name):
            rows.append(Row(place, "", _missing(first)))
            continue
        own = getattr(ours, name)
        if first != place:
            result = f"same as `{first}`" if own is _value_at(_own(first)) else "another object"
            rows.append(Row(place, _own(place), result))
            continue
        rows.append(Row(place, _own(place), _compared(place, value, own)))
        if inspect.isclass(value):
            rows += _member_rows(place, value, own)
        elif _package(type(value)) == "grain":
            rows += _member_rows(place, type(value), type(own))
    return rows


def _own(place: str) -> str:
    return "grainmill" + place.removeprefix("grain")


def _value_at(place: str) -> object:
    module, _, name = place.rpartition(".")
    return getattr(importlib.import_module(module), name, None)


def _public_names(module: ModuleType) -> list[str]:
    names = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
    names = {*names, *(n for n in ("__version__", "__version_info__") if hasattr(module, n))}
    return sorted(name for name in names if not inspect.ismodule(getattr(module, name)))


def _is_class_or_function(value: object) -> bool:
    return inspect.isclass(value) or inspect.isroutine(value)


def _missing(place: str) -> str:
    why = WHY.get(place)
    return f"not there: {why}" if why else "not there"


def _compared(place: str, theirs: object, ours: object) -> str:
    differs = _difference(theirs, ours)
    if isinstance(theirs, str | tuple | frozenset) and theirs != ours:
        differs = "another value"
    why = WHY.get(place)
    if not differs:
        return "same"
    return f"{differs}: {why}" if why else differs


def _member_rows(place: str, theirs: type, ours: type) -> list[Row]:
    """The members of a class that are not the same."""
    rows = []
    for name in sorted(_members(theirs)):
        value, own = (inspect.getattr_static(cls, name, None) for cls in (theirs, ours))
        member = f"{place}.{name}"
        if own is None and name not in _fields(ours):
            rows.append(Row(member, "", _missing(member)))
            continue
        result = _compared(member, _function(value), _function(own))
        if inspect.isroutine(_function(value)) and result != "same":
            rows.append(Row(member, _own(member), result))
    return rows


def _function(member: Any) -> Any:
    return getattr(member, "__func__", member)


def _members(cls: type) -> set[str]:
    """Public names that a class has from the package, of its metaclass and its enumeration too."""
    found: set[str] = set(cls.__members__) if issubclass(cls, enum.Enum) else set()
    for owner in (*cls.__mro__, *type(cls).__mro__):
        if _package(owner) == "grain":
            found |= {name for name in vars(owner) if name not in _BY_PYTHON}
            found |= _fields(owner)
    return {name for name in found if not name.startswith("_")}


def _fields(cls: type) -> set[str]:
    owners = [owner for owner in cls.__mro__ if _package(owner) in {"grain", "grainmill"}]
    return {name for owner in owners for name in inspect.get_annotations(owner)}


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _difference(theirs: object, ours: object) -> str:
    """How the parameters differ; empty if every call of the one is a call of the other."""
    expected, found = _parameters(theirs), _parameters(ours)
    if expected is None or found is None:
        return ""
    left = [f"`{name}`" for name in expected if name not in found]
    more = [f"`{name}`" for name in found if name not in expected]
    places = list(found)
    other = [
        f"`{name}`"
        for place, name in enumerate(expected)
        if name in found
        if not _fits(expected[name], found[name])
        or (expected[name].kind is not _BY_NAME and places[place : place + 1] != [name])
    ]
    parts = [("lacks ", left), ("has other ", other), ("also takes ", more)]
    return "; ".join(text + ", ".join(names) for text, names in parts if names)


def _parameters(value: object) -> dict[str, inspect.Parameter] | None:
    is_enum = inspect.isclass(value) and issubclass(value, enum.Enum)
    if not _is_class_or_function(value) or is_enum or getattr(value, "_is_protocol", False):
        return None
    try:
        parameters = inspect.signature(value).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    found = {name: one for name, one in parameters.items() if name not in {"self", "cls"}}
    if dataclasses.is_dataclass(value):  # a default may be a placeholder
        with contextlib.suppress(TypeError):
            made = value()  # type: ignore[operator]
            found = {name: one.replace(default=getattr(made, name)) for name, one in found.items()}
    return {name: one for name, one in found.items() if not name.startswith("_")}


def _fits(expected: inspect.Parameter, found: inspect.Parameter) -> bool:
    """Whether an argument that is passed as `expected` may be passed as `found`."""
    optional = _shown(expected.default) in {_shown(found.default), _shown(_NO_VALUE)}
    return optional and found.kind in {expected.kind, inspect.Parameter.POSITIONAL_OR_KEYWORD}


def _shown(default: object) -> str:
    """A default as text that does not depend on the package."""
    if isinstance(default, property):  # of a protocol that a dataclass is derived from
        default = _NO_VALUE
    if isinstance(default, type) or inspect.isfunction(default):
        return default.__name__
    if dataclasses.is_dataclass(default):
        return type(default).__name__
    return re.sub(r" at 0x[0-9a-f]+|\w+(\.\w+)+\.", "", repr(default))


def private_rows() -> list[Row]:
    """The names in the modules below `grainmill._src`."""
    package = importlib.import_module("grainmill._src")
    root = Path(package.__path__[0])
    rows = []
    for path in sorted(root.rglob("*.py")):
        if path.name == "__init__.py":
            continue
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        names = importlib.import_module(f"grainmill._src.{module}").__all__
        rows.append(Row(f"grain._src.{module}", ", ".join(f"`{name}`" for name in names), ""))
    return rows


def page() -> str:
    """The whole page."""
    seen: dict[int, str] = {}
    lines = [INTRODUCTION]
    for module in MODULES:
        lines += [f"## {module}", "", "| Grain | grainmill | |", "| --- | --- | --- |"]
        for row in rows_of(module, seen):
            ours = f"`{row.ours}`" if row.ours else ""
            lines.append(f"| `{row.grain}` | {ours} | {row.result} |")
        lines.append("")
    lines += [PRIVATE.strip(), "", "| module | names |", "| --- | --- |"]
    lines += [f"| `{row.grain}` | {row.ours} |" for row in private_rows()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
