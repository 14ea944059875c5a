"""Pages of the reference: one for each public module, and one for each public class.

They follow from `__all__` of the modules, so a new name has its place by itself. A name that
several modules have is described once, and listed by all of them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import griffe

# Modules whose names are described elsewhere if another module has them, too.
_LATER = ["experimental", "jax", "beam", "ray", "python", "python.experimental"]
INTRODUCTION = """\
# Reference

All public names, by the modules that programs import them from. Each class has a page; functions
are on the page of their module. `help` of a name says the same.

"""
_AS_SECTION = "    options:\n      heading_level: 2\n      show_root_toc_entry: true\n"


@dataclasses.dataclass(frozen=True)
class Name:
    """A public class or function, and by which name it is described."""

    path: str
    home: str
    is_class: bool
    summary: str

    @property
    def is_described_here(self) -> bool:
        """Whether it is described by this very name."""
        return self.path == self.home

    @property
    def row(self) -> str:
        """A line of the table of its module."""
        page = _page(self.home if self.is_class else _module_of(self.home), is_class=self.is_class)
        anchor = "" if self.is_class else f"#{self.home}"
        return f"| [`{_last(self.path)}`](../../{page}{anchor}) | {self.summary} |"


@dataclasses.dataclass(frozen=True)
class Module:
    """A public module."""

    path: str
    summary: str
    names: list[Name]

    @property
    def classes(self) -> list[Name]:
        """The classes with a page below its own."""
        return [name for name in self.names if name.is_class and name.is_described_here]

    @property
    def text(self) -> str:
        """Its page: what it is, tables of its classes and functions, and each function."""
        parts = [f"::: {self.path}\n    options:\n      members: false\n"]
        for heading, is_class in [("Class", True), ("Function", False)]:
            rows = [name.row for name in self.names if name.is_class == is_class]
            if rows:
                parts.append("\n".join([f"| {heading} | |", "| --- | --- |", *rows, ""]))
        parts += [
            f"::: {name.path}\n{_AS_SECTION}"
            for name in self.names
            if not name.is_class and name.is_described_here
        ]
        return "\n".join(parts)


def modules(package: griffe.Module) -> list[Module]:
    """The public modules, the package first."""
    members = {module.path: dict(_members(module)) for module in _public(package)}
    homes: dict[str, str] = {}
    for path in sorted(members, key=_lateness):
        for name, member in members[path].items():
            homes.setdefault(member.canonical_path, f"{path}.{name}")
    return [
        Module(
            path,
            _summary(package.modules_collection[path]),
            [
                Name(f"{path}.{name}", homes[one.canonical_path], one.is_class, _summary(one))
                for name, one in sorted(members[path].items())
            ],
        )
        for path in sorted(members)
    ]


def pages(found: list[Module]) -> Iterator[tuple[str, str]]:
    """The text of each page by its path."""
    rows = [f"| [`{one.path}`]({one.path}/index.md) | {one.summary} |" for one in found]
    yield "reference/index.md", "\n".join([f"{INTRODUCTION}| Module | |", "| --- | --- |", *rows])
    for module in found:
        yield _page(module.path), module.text
        for name in module.classes:
            yield _page(name.path, is_class=True), f"::: {name.path}\n"


def navigation(found: list[Module]) -> list[object]:
    """Pages of modules, and below each those of its classes."""
    entries: list[object] = ["reference/index.md"]
    for module in found:
        page = {module.path: _page(module.path)}
        classes = [{_last(one.path): _page(one.path, is_class=True)} for one in module.classes]
        short = module.path.removeprefix("grainmill.")
        entries.append({short: [page, *classes] if classes else page[module.path]})
    return entries


def _page(path: str, *, is_class: bool = False) -> str:
    folder, page = (_module_of(path), _last(path)) if is_class else (path, "index")
    return f"reference/{folder}/{page}.md"


def _module_of(path: str) -> str:
    return path.rpartition(".")[0]


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _public(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for inner in module.modules.values():
        if not inner.is_alias and not inner.name.startswith("_"):
            yield from _public(inner)


def _members(module: griffe.Module) -> Iterator[tuple[str, griffe.Object]]:
    for name in module.exports or ():
        member = module.members[name]
        if member.is_class or member.is_function:
            yield name, member


def _lateness(path: str) -> tuple[int, str]:
    name = path.partition(".")[2]
    return (_LATER.index(name) + 1 if name in _LATER else 0, path)


def _summary(member: griffe.Object) -> str:
    text = member.docstring.value if member.docstring else ""
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")
