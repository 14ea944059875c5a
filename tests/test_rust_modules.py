"""Files and folders of each Rust crate use each other in one direction, as their sources show."""

import re
from pathlib import Path

import pytest

RUST = Path(__file__).parents[1] / "rust"
CRATES = ["benches", "core", "image", "models", "object_store", "parquet", "py"]

USE = re.compile(r"(?m)^\s*(pub(?:\(\w+\))? )?use ([^;]+);")
ITEM = r"(?:fn|struct|enum|trait|type|const|static|macro_rules!)"


def imported(tree: str) -> dict[str, list[str]]:
    """By name, what a `use` imports: of `a::{self, b as c}` that is `a` and, as `c`, `a::b`."""
    tree = tree.strip()
    head, brace, group = tree.partition("{")
    if not brace:
        path, _, name = tree.partition(" as ")
        names = path.strip().split("::")
        return {name.strip() or names[-1]: names}
    parts, depth = [""], 0
    for char in group[: group.rindex("}")]:
        depth += (char == "{") - (char == "}")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    prefix = [name for name in head.strip().split("::") if name]
    found = {}
    for part in filter(str.strip, parts):
        for name, path in imported(part).items():
            if name == "self":
                found[prefix[-1]] = prefix
            else:
                found[name] = prefix + path
    return found


class Crate:
    """The modules of a crate, each a tuple of names, without comments and tests."""

    def __init__(self, files: dict[str, str]) -> None:
        self.sources = {}
        for file, source in files.items():
            *folders, name = file.removesuffix(".rs").split("/")
            if name == "tests":
                continue
            module = (*folders, *([] if name in {"lib", "main", "mod"} else [name]))
            code = re.sub(r"//[^\n]*", "", source).partition("#[cfg(test)]\nmod tests")[0]
            # What a module inside of a file calls `super` is that file.
            self.sources[module] = re.sub(
                r"(?ms)^(?:pub )?mod \w+ \{$.*?^\}",
                lambda inner: re.sub(r"(?<![\w:])super::", "self::", inner[0]),
                code,
            )
        self.imports = {
            module: {
                name: path for _, tree in USE.findall(code) for name, path in imported(tree).items()
            }
            for module, code in self.sources.items()
        }

    def module_of(self, user: tuple[str, ...], path: list[str], depth: int = 0):
        """The module that defines what `user` calls `path`; None if no module of the crate does."""
        module, names = user, list(path)
        if names[0] == "crate":
            module, names = (), names[1:]
        elif names[0] not in {"self", "super"} and (*user, names[0]) not in self.sources:
            return None
        while names and names[0] in {"self", "super"}:
            module = module[:-1] if names.pop(0) == "super" else module
        while names and (*module, names[0]) in self.sources:
            module = (*module, names.pop(0))
        defines = names and re.search(rf"\b{ITEM} {names[0]}\b", self.sources[module])
        if names and not defines and names[0] in self.imports[module] and depth < 9:
            return self.module_of(module, self.imports[module][names[0]], depth + 1) or module
        return module

    def uses(self) -> dict[tuple[str, ...], set[tuple[str, ...]]]:
        """For each module those that it uses; what it only exports is used by others."""
        used: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
        for module, code in self.sources.items():
            body = USE.sub("", code)
            paths = [path.split("::") for path in re.findall(r"(?<![\w:])(?:\w+::)+\w+", body)]
            for public, tree in USE.findall(code):
                for name, path in imported(tree).items():
                    if not public or re.search(rf"(?<![\w:.]){name}\b", body):
                        paths.append(path)
            found = {self.module_of(module, path) for path in paths}
            used[module] = {other for other in found if other is not None} - {module}
        return used


def in_circles(uses) -> set:
    """The nodes of `uses` that use themselves through others."""

    def reached_from(start):
        reached, left = set(), [start]
        while left:
            new = uses.get(left.pop(), set()) - reached
            reached |= new
            left += new
        return reached

    return {node for node in uses if node in reached_from(node)}


def folded(uses, folder: tuple[str, ...]) -> dict[tuple[str, ...], set[tuple[str, ...]]]:
    """What the entries of `folder`, files and folders, use of each other."""
    len_of_entry, entries = len(folder) + 1, {}
    for module, used in uses.items():
        if module[:-1][: len(folder)] == folder and module != folder:
            entry = module[:len_of_entry]
            others = {other[:len_of_entry] for other in used if other[: len(folder)] == folder}
            entries.setdefault(entry, set()).update(others - {entry, folder})
    return entries


def circular(crate: Crate) -> set[str]:
    """The files and folders of `crate` that use each other in a circle."""
    uses = crate.uses()
    folders = {module[:depth] for module in uses for depth in range(len(module))}
    found = in_circles(uses).union(*(in_circles(folded(uses, folder)) for folder in folders))
    return {"/".join(module) for module in found}


def crate_of(name: str) -> Crate:
    root = RUST / name / "src"
    sources = {
        path.relative_to(root).as_posix(): path.read_text("utf-8") for path in root.rglob("*.rs")
    }
    return Crate(sources)


@pytest.mark.parametrize("name", CRATES)
def test_modules_have_no_circle(name):
    assert not circular(crate_of(name))


def test_every_crate_is_looked_at():
    crates = {path.parents[1].name for path in RUST.glob("*/src/*.rs")}
    assert crates - {"fuzz"} == set(CRATES)
    assert sum(len(used) for used in crate_of("core").uses().values()) > 400


@pytest.mark.parametrize(
    "files",
    [
        {"x.rs": "use crate::b::B;", "b.rs": "use super::x::{A, f};"},
        {"x.rs": "fn f() { crate::b::g() }", "b.rs": "use crate::{c, x::f as h};\nfn g() {}"},
        {"a/mod.rs": "mod b;\nstruct A;\nuse b::B;", "a/b.rs": "use super::A;"},
        {"a/mod.rs": "mod b;\nfn f() { b::g() }", "a/b.rs": "fn g() { super::f() }"},
        # Through what a module exports: `C` is that of `a/c.rs`.
        {"a/mod.rs": "pub use c::C;", "a/c.rs": "use crate::b::B;", "b.rs": "use crate::a::C;"},
        {"a/mod.rs": "pub use b::B;\nfn f() { B::new() }", "a/b.rs": "use super::f;"},
        # Between a folder and a file, though no two files use each other.
        {"a/b.rs": "use crate::d::D;", "a/c.rs": "", "d.rs": "use crate::a::c::C;"},
    ],
)
def test_circles_are_found(files):
    assert circular(Crate({"lib.rs": "", "a/mod.rs": "", **files}))


@pytest.mark.parametrize(
    "files",
    [
        {
            "x.rs": "use crate::b::B;",
            "b.rs": "// crate::x\n#[cfg(test)]\nmod tests { use super::x; }",
        },
        {
            "a/mod.rs": "mod b;\nmod c;\npub use b::B;",
            "a/c.rs": "use super::B;",
            "a/b.rs": "use super::d;",
        },
        {
            "x.rs": "use std::b;\nmod inner {\n    use super::A;\n}\nstruct A;",
            "b.rs": "use crate::x::A;",
        },
    ],
)
def test_what_is_no_circle_is_none(files):
    assert not circular(Crate({"lib.rs": "", "a/mod.rs": "", "a/d.rs": "", **files}))
