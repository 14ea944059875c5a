"""Rules for imports between layers, starting threads and exceptions, checked in the sources."""

import ast
import builtins
import functools
import graphlib
import re
import sys
from pathlib import Path

import pytest

from grainmill import experimental
from grainmill._dataset.iterator import DatasetIterator

ROOT = Path(__file__).parents[1]
CORE = ROOT / "rust/core/src"
FACE = ROOT / "python/grainmill"

# Each uses only itself and earlier ones; `batch` and `pack` do not use each other.
CORE_LAYERS = [
    {"bytes", "error", "sync", "url", "varint"},
    {"lock"},
    {"interrupt", "parse", "platform", "process", "write_prefetcher"},
    {"compute", "timeline", "try_alloc", "shared_memory"},
    {"order"},
    {"batch", "pack"},
    {"io"},
    {"formats"},
    {"read"},
]
FACE_LAYERS = [
    {"_interrupts", "_native"},
    {
        "_atomic_file",
        "_example",
        "_lazy_dataclass",
        "_lazy_names",
        "_memory",
        "_threads",
        "_tree",
        "_url",
    },
    {"_index_file", "array_record", "shared_memory_array"},
    {"_plan"},
    {"_images", "_parsing"},
    {"_stats"},
    {"_checkpoint", "_workers"},
    {"_cache"},
    {"_evaluate"},
    {"_iterators"},
    {"_dataset"},
    {"_stages"},
    {"_loader"},
    {"_sources", "_shared_memory_source"},
]
# What is above the layers, and the files that import it.
FACE_ABOVE = {
    "_beam": {"beam.py"},
    "_files": {"files.py"},
    "_materialize": {"ray.py", "_beam/files.py", "_beam/materialize.py"},
    "_tools": {"__main__.py"},
    "_as_grain": {"__init__.py", "as_grain.py"},
    "_src": set(),
    "_grain_path": set(),
}
# Programs over the package: they use its public names, each other, and what is listed here.
PROGRAMS = {"_tools", "_beam", "_materialize", "ray"}
PRIVATE_OF_PROGRAMS = {
    # Of `argparse`: how an option with a value is shown, as from Python 3.13 on.
    # And a verdict of iterators of any class: `bench` has no consumer that could be to blame. And
    # for `doctor`, how the engine was compiled, and what the package takes the machine for.
    "_tools": {
        "._format_action_invocation",
        "._is_gil_enabled",
        "_dataset.views.statistics.asked_verdict",
        *("_memory.group_limits", "_memory.lines_of", "_memory.machine_bytes"),
        *("_memory.usable_bytes", "_workers.limits.workers_are_processes"),
        *("_native.features", "_native.num_cores", "_native.profile"),
    },
    # Files that Beam opens, read by the engine.
    "_beam": {"_native.RecordFiles", "_native.RecordStream"},
}

# Accepted upward references: (file, layer) -> why.
CORE_EXCEPTIONS: dict[tuple[str, str], str] = {}

# Python files that import inside a function: file -> modules, and why not at the top.
LATE_IMPORTS = {
    # JAX is optional and takes a second to import.
    "sharding.py": {"grainmill.jax"},
    # So is Orbax, which imports JAX.
    "checkpoint.py": {"grainmill._checkpoint.handler"},
    "_checkpoint/handler.py": {"grainmill._checkpoint"},
    # What starts processes takes a tenth of the time that importing the package does.
    "_iterators/read.py": {"grainmill._evaluate.prefetch.processes"},
    "_iterators/workers/worker_shards.py": {"grainmill._iterators.workers.remote"},
    "_evaluate/rng.py": {"grainmill._evaluate.philox_key"},
    "_memory.py": {"pathlib"},
    # A system may have none.
    "_cache/memory.py": {"fcntl"},
    "_workers/limits.py": {"select", "socket"},
    "_dataset/views/observers.py": {"grainmill._dataset.views.drawing"},
    # So does what only some programs use: checkpoints and named shared memory.
    "_dataset/iterator.py": {"grainmill._checkpoint"},
    "_dataset/shared_batches.py": {"grainmill.shared_memory_array"},
    "multiprocessing.py": {"grainmill"},
    "sources.py": {"grainmill._index_file", "grainmill._sources.tfds"},
    "_dataset/views/reprs.py": {"grainmill._dataset.views.description"},
    "_dataset/views/running_reprs.py": {"grainmill._dataset.views.running"},
    "_dataset/map_dataset.py": {"grainmill._cache.make"},
    "_dataset/iter_dataset.py": {"grainmill._cache.make"},
    # It takes 40 ms to import, and whoever awaits something has imported it.
    "_checkpoint/states.py": {"asyncio"},
}
# Files that start threads. The engine's are those of `io` that read, those of `compute` that share
# loops, those that encode copies, and one that waits for the parent's end if the system has no
# signal for it; Python's are those that run user functions, which `_threads` starts and stops,
# except for one.
CORE_THREADS = {"compute.rs", "io/pool.rs", "platform/portable.rs", "read/copy.rs"}
FACE_THREADS = {
    "_threads.py",
    # Where workers cannot be forked, a thread of each waits for the parent's end.
    "_workers/zygote.py",
}

# What `map` and `filter` may call: nothing of Python's, as a `StopIteration` of a signal handler
# would end them unseen.
MAPPED = {"None", "id", "int", "is_", "len", "repr", "str", "sum", "type"}
MAPPED |= {
    "lock.acquire",
    "np.concatenate",
    "opened.read_one",
    "self._numbers.__getitem__",
    "str.strip",
}
# Where the user has no signal handlers: in commands and workers.
WITHOUT_HANDLERS = ("_beam/", "_tools/", "_workers/")
# What computes elements: it asks of each exception of a common class whether a handler raised it.
ELEMENTS = ("_evaluate/", "_iterators/", "_stages/")
# Files that need not ask in some places, and why.
UNASKED = {
    "_evaluate/prefetch/block_job.py": "in workers",
    "_iterators/workers/pipeline_job.py": "in workers",
    "_iterators/base/cursor.py": "in workers: where a state is pickled",
    "_iterators/thread_prefetch.py": "in a thread",
}

STARTS_THREADS = {
    "rs": re.compile(r"thread::(spawn|scope|Builder)|ThreadPoolBuilder|rayon::(spawn|scope|join)"),
    "py": re.compile(r"\bThread\(|ThreadPoolExecutor|start_new_thread|multiprocessing\.pool"),
}


def rank_of(layer: str, layers: list[set[str]]) -> int | None:
    return next((rank for rank, names in enumerate(layers) if layer in names), None)


def upward(user: str, used: str, layers: list[set[str]]) -> bool:
    """Whether `user` refers to a layer that is not below it."""
    user_rank, used_rank = rank_of(user, layers), rank_of(used, layers)
    return (
        used != user
        and used_rank is not None
        and user_rank is not None
        and (used_rank >= user_rank)
    )


def layers_in_the_map() -> list[list[set[str]]]:
    """The layers of the core and of the package that ARCHITECTURE.md shows."""
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    (block,) = re.findall(r"^```text\na <- b: .*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    core, face = re.split(r"^(?:rust/core|python/grainmill) ", block, flags=re.MULTILINE)[1:]
    return [[set(re.findall(r"\w+", layer)) for layer in part.split("<-")] for part in (core, face)]


def test_the_map_shows_the_layers():
    assert layers_in_the_map() == [CORE_LAYERS, FACE_LAYERS]


# --- the core ---------------------------------------------------------------------------------


def crate_layers_named_in(path: Path, source: str) -> set[str]:
    """The modules at the crate's root that a Rust file refers to by `crate::` or `super::`."""
    code = re.sub(r"//[^\n]*", "", source)
    parts = path.relative_to(CORE).with_suffix("").parts
    depth = len(parts) - (parts[-1] in {"mod", "lib"})
    roots = [r"\bcrate::"]
    if depth:
        # A `mod tests` inside the file is one step deeper.
        roots += [rf"(?<![\w:])(?:super::){{{depth}}}(?!super)"]
        roots += [rf"(?<![\w:])(?:super::){{{depth + 1}}}(?!super)"]
    named: set[str] = set()
    for root in roots:
        named |= set(re.findall(root + r"(\w+)", code))
        for group in re.findall(root + r"\{(.*?)\};", code, flags=re.DOTALL):
            named |= set(re.findall(r"(?:^|,)\s*(\w+)", group))
    return named


def core_references() -> list[tuple[str, str, str]]:
    """(file, its layer, a layer it refers to) of every file in a layer of the core."""
    found = []
    for path in sorted(CORE.rglob("*.rs")):
        name = str(path.relative_to(CORE))
        layer = path.relative_to(CORE).with_suffix("").parts[0]
        if layer == "lib":
            continue
        source = path.read_text("utf-8")
        found += [(name, layer, used) for used in crate_layers_named_in(path, source)]
    return found


def test_core_layers_use_only_lower_ones():
    references = core_references()
    assert {layer for _, layer, _ in references} >= {"order", "formats", "batch"}
    wrong = {(file, used) for file, layer, used in references if upward(layer, used, CORE_LAYERS)}
    assert wrong == set(CORE_EXCEPTIONS)


def test_every_module_of_the_core_has_a_layer():
    declared = re.findall(
        r"^(?:pub )?mod (\w+);", (CORE / "lib.rs").read_text("utf-8"), flags=re.MULTILINE
    )
    assert set(declared) == set().union(*CORE_LAYERS)


def test_core_knows_no_python():
    image = ROOT / "rust/image"
    for path in [*CORE.rglob("*.rs"), CORE.parent / "Cargo.toml", *image.rglob("*.[rt][so]*")]:
        assert not re.search(r"\bpyo3\b|\bnumpy::", path.read_text("utf-8")), path


def test_object_stores_know_no_python_and_no_format():
    files = list((ROOT / "rust/object_store/src").rglob("*.rs"))
    assert files
    for path in files:
        knows = r"pyo3|array_record|riegeli|grainmill_core::(?:formats|read)\b"
        assert not re.search(knows, path.read_text("utf-8")), path


def test_order_has_no_clock_no_file_and_no_thread():
    banned = re.compile(r"std::(fs|io|net|time|thread|env)\b|\brayon\b|\brustix\b|\bstatic mut\b")
    for path in (CORE / "order").rglob("*.rs"):
        assert not banned.search(re.sub(r"//[^\n]*", "", path.read_text("utf-8"))), path


def test_only_the_platform_module_names_what_one_system_has():
    one_system = re.compile(
        r"memfd|SealFlags|LinuxRemove|death_signal|pidfd|preadv2|RUSAGE_THREAD|linux_raw|io_uring"
        r"|os::linux|\blibc\b"
    )
    any_system = re.compile(r"\brustix\b|std::os::|\btarget_os\b")
    for path in CORE.rglob("*.rs"):
        name = str(path.relative_to(CORE))
        if name.startswith("platform/"):
            continue
        code = re.sub(r"//[^\n]*", "", path.read_text("utf-8").partition("mod tests")[0])
        assert not one_system.search(code), name
        assert not any_system.search(code), name


@pytest.mark.parametrize(
    ("file", "source", "named"),
    [
        ("order/mix.rs", "use crate::{Error, read::files};", {"Error", "read"}),
        ("order/mix.rs", "fn f() { super::super::pack::place() }", {"pack"}),
        ("formats/riegeli/chunk.rs", "use super::block::Block;", set()),
        ("order/mix.rs", "// see crate::read", set()),
    ],
)
def test_references_are_found(file, source, named):
    assert crate_layers_named_in(CORE / file, source) == named


# --- the Python package -----------------------------------------------------------------------


def imports_of(tree: ast.Module) -> list[tuple[str, bool]]:
    """(module, whether the import is inside a function) of every import."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, *, late: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module != "grainmill":  # Each name imported from there is a module.
                found.append((node.module or "", late))
            found.extend((f"{node.module}.{alias.name}", late) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child, late=late or isinstance(node, ast.FunctionDef | ast.Lambda))

    visit(tree, late=False)
    return found


@functools.cache
def face_imports() -> list[tuple[str, str, bool]]:
    """(file, module, late) of every import in the package."""
    return [
        (str(path.relative_to(FACE)), module, late)
        for path in sorted(FACE.rglob("*.py"))
        for module, late in imports_of(ast.parse(path.read_text("utf-8")))
    ]


def layer_in_face(name: str) -> str:
    """The layer of a dotted module of the package, or of a file's path in it."""
    return name.removesuffix(".py").replace("/", ".").removeprefix("grainmill.").split(".")[0]


def test_face_layers_use_only_lower_ones():
    for file, module, _ in face_imports():
        if module.startswith("grainmill."):
            user, used = layer_in_face(file), layer_in_face(module)
            assert not upward(user, used, FACE_LAYERS), f"{file} imports {module}"


def test_layers_use_only_layers():
    for file, module, _ in face_imports():
        if rank_of(layer_in_face(file), FACE_LAYERS) is not None:
            assert module != "grainmill", f"{file} imports the package"
            if module.startswith("grainmill."):
                used = rank_of(layer_in_face(module), FACE_LAYERS)
                assert used is not None, f"{file} imports {module}"


def test_every_private_module_has_a_layer():
    private = {layer_in_face(path.name) for path in FACE.glob("_[!_]*")}
    assert private <= set().union(*FACE_LAYERS) | FACE_ABOVE.keys()


def test_what_is_above_the_layers_is_imported_by_its_public_module_only():
    importers = {above: set() for above in FACE_ABOVE}
    for file, module, _ in face_imports():
        used = layer_in_face(module)
        if module.startswith("grainmill.") and used in FACE_ABOVE and layer_in_face(file) != used:
            importers[used].add(file)
    assert importers == FACE_ABOVE


def is_private(name: str) -> bool:
    """Whether a dotted name has a part that begins with one underscore."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names_in(tree: ast.Module) -> set[str]:
    """The private modules and names of the package that a file uses, and attributes as `.name`."""
    imported = {}
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used |= {a.name for a in node.names}
            roots = {a.name.split(".")[0] for a in node.names if not a.asname}
            imported |= {root: root for root in roots}
            imported.update({a.asname: a.name for a in node.names if a.asname})
        elif isinstance(node, ast.ImportFrom):
            imported.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    used, modules = used | set(imported.values()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner in imported:
                modules.add(imported[owner])
                used.add(f"{imported[owner]}.{node.attr}")
            elif owner not in {"self", "cls"}:
                used.add(f".{node.attr}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "hasattr"}:
            name = node.args[1]
            used |= {f".{name.value}"} if isinstance(name, ast.Constant) else set()
    ours = {name for name in used - modules if name.startswith((".", "grainmill."))}
    found = {name for name in ours if is_private(name) and layer_in_face(name) not in PROGRAMS}
    return {name.removeprefix("grainmill.") for name in found}


def test_programs_use_public_names_and_listed_ones():
    used: dict[str, set[str]] = {}
    for path in sorted(FACE.rglob("*.py")):
        layer = layer_in_face(str(path.relative_to(FACE)))
        if layer in PROGRAMS:
            names = private_names_in(ast.parse(path.read_text("utf-8")))
            if names:
                used[layer] = used.get(layer, set()) | names
    assert used == PRIVATE_OF_PROGRAMS


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from grainmill import MapDataset, _native as n\nn.f(n._g)", {"_native.f", "_native._g"}),
        ("from grainmill._url import shown", {"_url.shown"}),
        ("import grainmill._tree\ngrainmill._tree.leaves", {"_tree"}),
        ("import grainmill._tree as t\nt.leaves", {"_tree.leaves"}),
        ("from grainmill import as_grain\nas_grain._main()", {"as_grain._main"}),
        ("from grainmill.sources import _x\n_x", {"sources._x"}),
        ("def f(self, ds):\n    self._own, ds._node, self.ds._plan.x", {"._node", "._plan"}),
        ("getattr(x, '_files', None)\nhasattr(x, 'files')", {"._files"}),
        ("from grainmill._tools import reading\nfrom grainmill import __version__", set()),
        ("import os\nos.path._x\nos._y", {"._x"}),
    ],
)
def test_private_names_are_found(source, found):
    assert private_names_in(ast.parse(source)) == found


def test_imports_stand_on_top():
    late: dict[str, set[str]] = {}
    for file, module, inside in face_imports():
        if inside:
            late.setdefault(file, set()).add(module)
    for file, modules in late.items():
        for module in modules:
            agreed = LATE_IMPORTS.get(file, set())
            assert any(module == name or module.startswith(f"{name}.") for name in agreed), (
                f"{file} imports {module} inside a function"
            )


def test_private_names_of_grain_are_for_programs_only():
    for file, module, _ in face_imports():
        if module.startswith("grainmill._src"):
            assert file.startswith("_src/"), f"{file} imports {module}"


def test_only_one_module_imports_jax():
    importers = {
        file for file, module, late in face_imports() if module.split(".")[0] == "jax" and not late
    }
    assert importers == {"jax.py"}


def test_plan_nodes_know_no_thread():
    for path in (FACE / "_plan").rglob("*.py"):
        for module, _ in imports_of(ast.parse(path.read_text("utf-8"))):
            assert module.split(".")[0] not in {
                "threading",
                "concurrent",
                "queue",
                "multiprocessing",
            }


# --- exceptions -------------------------------------------------------------------------------


def syntax_of_face():
    """(file, node of its syntax) of every node in the package."""
    for path in sorted(FACE.rglob("*.py")):
        file = str(path.relative_to(FACE))
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            yield file, node


def test_map_calls_nothing_that_a_signal_handler_may_interrupt():
    for file, node in syntax_of_face():
        if file.startswith(WITHOUT_HANDLERS) or not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in {"map", "filter"}:
            called = ast.unparse(node.args[0])
            assert called in MAPPED or called.startswith("attrgetter("), (
                f"{file}:{node.lineno} maps {called}"
            )


def is_common(kind):
    """Whether `except kind` catches what a signal handler may raise, but not everything."""
    names = set(re.findall(r"\w+", ast.unparse(kind)))
    return "BaseException" not in names and any(
        isinstance(getattr(builtins, name, None), type) for name in names
    )


def test_who_catches_a_common_class_lets_signal_handlers_raise_it():
    for file, node in syntax_of_face():
        if not file.startswith(ELEMENTS) or file in UNASKED:
            continue
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) != "contextlib.suppress", f"{file}:{node.lineno}"
        elif isinstance(node, ast.ExceptHandler) and is_common(node.type):
            raises = any(isinstance(each, ast.Raise) and not each.exc for each in node.body)
            text = ast.unparse(node)
            asks = "raise_interrupt(" in text or "is_interrupt(" in text
            assert raises or asks, f"{file}:{node.lineno} catches {ast.unparse(node.type)}"


# --- cycles -----------------------------------------------------------------------------------


def used_in_face() -> dict[str, set[str]]:
    """For each module of the package, those it imports: at the top, late, or for types only."""
    modules = {
        f"grainmill.{'.'.join(path.relative_to(FACE).with_suffix('').parts)}".removesuffix(
            ".__init__"
        )
        for path in FACE.rglob("*.py")
    }
    used: dict[str, set[str]] = {module: set() for module in modules}
    for file, imported, _ in face_imports():
        user = f"grainmill.{file.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")
        # A name of a module is not a module; its package is imported with it.
        used[user] |= {imported} & modules - {user}
    return used


def test_files_have_no_circle():
    used = used_in_face()
    assert any(used.values())
    graphlib.TopologicalSorter(used).prepare()  # raises CycleError


# --- threads ----------------------------------------------------------------------------------


def starters(root: Path, suffix: str) -> set[str]:
    """The files below `root` that start threads, except in unit tests."""
    not_run = {"rs": r"//[^\n]*|#\[cfg\(test\)\].*", "py": r"#[^\n]*"}[suffix]
    flags = re.DOTALL if suffix == "rs" else 0
    return {
        str(path.relative_to(root))
        for path in root.rglob(f"*.{suffix}")
        if STARTS_THREADS[suffix].search(re.sub(not_run, "", path.read_text("utf-8"), flags=flags))
    }


def test_engine_starts_threads_in_named_places_only():
    assert starters(CORE, "rs") == CORE_THREADS
    assert not starters(ROOT / "rust/py/src", "rs")


def test_face_starts_threads_in_named_places_only():
    assert starters(FACE, "py") == FACE_THREADS


def test_iterators_have_the_names_that_their_modules_give_them():
    """Messages of Python show them."""
    for name in experimental.__all__:  # their modules are imported when they are used
        getattr(experimental, name)
    kinds = [DatasetIterator]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if kind.__module__.startswith("grainmill.") and kind.__qualname__ == kind.__name__:
            assert getattr(sys.modules[kind.__module__], kind.__name__, None) is kind
        assert kind.__qualname__.rpartition(".")[2] == kind.__name__, kind
    assert len(kinds) > 5
