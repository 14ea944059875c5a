"""Programs and libraries that import Grain run on grainmill without a change."""

import ast
import importlib
import json
import os
import pathlib
import pickle
import subprocess
import sys
import textwrap

import pytest

import grainmill
from grainmill import _as_grain

pytestmark = pytest.mark.better_than_grain("grainmill under the name of Grain")

PROGRAMS = pathlib.Path(__file__).parent / "programs"
AS_GRAIN = ("-m", "grainmill.as_grain")
INSTALL = "import grainmill\ngrainmill.install_as_grain()\n"


def run(*command, cwd=None, check=True, **environment):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


# What the programs print with Grain 0.2.18, whose workers take seconds to start.
RECORDED = json.loads((PROGRAMS / "with_grain.json").read_text())


@pytest.mark.parametrize("name", RECORDED)
def test_program_computes_what_it_computes_with_grain(name, tmp_path):
    ours = run(*AS_GRAIN, PROGRAMS / f"{name}.py", tmp_path / "ours").stdout
    assert json.loads(ours) == RECORDED[name]


LIVE = "axlearn_style"  # it has no workers


@pytest.mark.parametrize(
    "name",
    [name if name == LIVE else pytest.param(name, marks=pytest.mark.long) for name in RECORDED],
)
def test_program_computes_with_grain_what_was_recorded(name, tmp_path):
    assert json.loads(run(PROGRAMS / f"{name}.py", tmp_path).stdout) == RECORDED[name]


# Takes seconds to import Keras, in the program and in workers, which get functions of it.
def test_keras_trains_on_each_kind_of_dataset():
    program = PROGRAMS / "keras_style.py"
    found = json.loads(run(*AS_GRAIN, program, KERAS_BACKEND="jax").stdout)
    losses = found["arrays"]
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0]
    for kind in ("MapDataset", "IterDataset", "DataLoader", "validation"):
        assert found[kind] == pytest.approx(losses), kind
    assert found["with a worker"] == pytest.approx(losses[:1])
    assert found["type"]
    assert found["types"] == [True, True, True, False]
    assert found["split"] == "Unsupported dataset type"
    assert found["rescaled"]
    assert found["windows"]
    assert found["in_pipeline"] == [True, True, True, True, False]


CHILDREN = """
import multiprocessing, os, subprocess, sys

import grain.python as pygrain
from grain import experimental
import grain
import grainmill._workers.worker_group

def doubled(x):
    import grain.sharding
    return 2 * x if grain.sharding.__name__ == "grainmill.sharding" else None

def version(_):
    import grain
    return grain.__version__

def child(queue):
    from grain._src.core.sharding import even_split
    elements = list(grain.MapDataset.range(3).map(doubled))
    queue.put((grain.__name__, even_split.__module__.split(".")[0], elements))

if __name__ == "__main__":
    for method in ["fork", "spawn", "forkserver"]:
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        print(method, *queue.get(timeout=100))
        process.join()
    options = grain.MultiprocessingOptions(num_workers=1)
    ds = pygrain.MapDataset.range(4).map(doubled).to_iter_dataset().mp_prefetch(options)
    print("workers", list(ds))
    grainmill._workers.worker_group._can_fork[0] = False  # as where a fresh Python has threads
    print("spawned workers", list(ds))
    versions = pygrain.MapDataset.range(2).map(version).to_iter_dataset().mp_prefetch(options)
    print("version", set(versions) == {grain.__version__})
    code = "import grain.python; print('program', grain.python.__name__)"
    print(subprocess.check_output([sys.executable, "-c", code], text=True).strip())
    print("one object", experimental is grain.experimental, pygrain is grain.python)
"""
FROM_CHILDREN = [
    "fork grainmill grainmill [0, 2, 4]",
    "spawn grainmill grainmill [0, 2, 4]",
    "forkserver grainmill grainmill [0, 2, 4]",
    "workers [0, 2, 4, 6]",
    "spawned workers [0, 2, 4, 6]",
    "version True",
    "program grainmill.python",
    "one object True True",
]


@pytest.mark.parametrize("started", ["file", "module", "first lines"])
def test_child_processes_and_workers_get_the_same_modules(started, tmp_path):
    path = tmp_path / "children.py"
    path.write_text((INSTALL if started == "first lines" else "") + CHILDREN)
    command = {
        "file": [*AS_GRAIN, path],
        "module": [*AS_GRAIN, "-m", "children"],
        "first lines": [path],
    }[started]
    assert run(*command, cwd=tmp_path).stdout.splitlines() == FROM_CHILDREN


SHOWN = """
import __main__, json, sys
shown = {name: str(value) for name, value in vars(__main__).items()
         if name not in ("__loader__", "__builtins__", "__spec__", "__annotations__")}
path = [entry for entry in sys.path if not entry.endswith("_grain_path")]
spec = __spec__ and [__spec__.name, __spec__.origin]
loader = [type(__loader__).__name__, __loader__.path]
print(json.dumps([sys.argv, path, __name__, spec, loader, shown, type(__builtins__).__name__]))
sys.exit(int(sys.argv[-1]))
"""


@pytest.mark.parametrize("flags", [[], ["-P"]])
@pytest.mark.parametrize("program", ["show.py", "link.py", "-m"])
def test_program_finds_what_python_gives_it(program, flags, tmp_path):
    """Arguments, path, main module and exit code are those of a program that Python itself runs."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/show.py").write_text(SHOWN)
    (tmp_path / "show.py").write_text(SHOWN)
    (tmp_path / "link.py").symlink_to(tmp_path / "elsewhere/show.py")
    command = [*(["-m", "show"] if program == "-m" else [program]), "-x", "--flag", "-m", "7"]
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(tmp_path)])
    expected, found = (
        run(
            *flags,
            *how,
            *command,
            "-x",
            "--flag",
            "-m",
            "7",
            cwd=tmp_path,
            check=False,
            PYTHONPATH=path,
        )
        for how in ([], AS_GRAIN)
    )
    assert expected.returncode == found.returncode == 7, found.stderr
    assert json.loads(found.stdout) == json.loads(expected.stdout)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "usage: python -m grainmill.as_grain"),
        (["--x"], "usage"),
        (["-m", "nowhere"], "nowhere"),
        (["no/where.py"], "no/where.py': No such file or directory"),
    ],
)
def test_program_that_cannot_be_run_is_refused(arguments, said):
    done = run(*AS_GRAIN, *arguments, check=False)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def printed(code):
    return run("-c", INSTALL + textwrap.dedent(code)).stdout.splitlines()


def test_grain_that_was_imported_before_is_named():
    code = "import grain, grainmill\ngrainmill.install_as_grain()"
    done = run("-c", code, check=False)
    message = done.stderr.splitlines()[-1]
    assert message.startswith("ImportError: `grain` was already imported from ")
    assert "python -m grainmill.as_grain" in message


def test_python_without_grainmill_imports_what_it_has(tmp_path):
    """Such a process may inherit the path from one that has called `install_as_grain`."""
    (tmp_path / "grain.py").write_text("NAME = 'the one that is installed there'")
    path = os.pathsep.join([_as_grain._PATH, str(tmp_path)])
    code = "import grain, sys; print(grain.NAME, sys.modules['grain'] is grain)"
    done = run("-S", "-c", code, PYTHONPATH=path)
    assert done.stdout == "the one that is installed there True\n"


def test_installing_again_changes_nothing():
    found = printed("""
        import os, sys
        before = [*sys.path], os.environ["PYTHONPATH"], [*sys.meta_path]
        grainmill.install_as_grain()
        print(before == ([*sys.path], os.environ["PYTHONPATH"], [*sys.meta_path]))
        del sys.modules["grain"]  # as some test runners do
        import grain
        print(grain is grainmill, before[2] == sys.meta_path)
    """)
    assert found == ["True", "True True"]


def test_child_that_installs_too_adds_nothing():
    code = f"""{INSTALL}
import os, sys
print([str(path).count("_grain_path") for path in (os.environ["PYTHONPATH"], sys.path)])
"""
    found = printed(f"""
        import subprocess, sys
        code = {code!r}
        print(subprocess.check_output([sys.executable, "-c", code], text=True).strip())
    """)
    assert found == ["[1, 1]"]


def test_modules_are_found_as_if_grain_were_a_package():
    found = printed("""
        import importlib, importlib.metadata, pickle, sys
        from importlib.util import find_spec
        print(find_spec("grain").name, find_spec("grain.sources").name)
        for name in ["grain.nothing", "grain.sources.nothing", "grain._src.nothing.nothing"]:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                print(error.name)
        import grain.sources, grain._src.core.sharding, grain.python.experimental
        from grain import python as pygrain
        print(grain.sources.__spec__.name, grain.__spec__.name)
        print(grain.__version__ == grainmill.__version__)
        print(importlib.metadata.version("grain"))
        print(importlib.reload(grain.sharding) is sys.modules["grainmill.sharding"])
        doubled = [n for n in sys.modules if n.startswith("grain.")
                   and sys.modules[n] is not sys.modules["grainmill" + n[5:]]]
        print(doubled)
        # A class that Grain itself has pickled, by the module that it is defined in there.
        grains = b"cgrain._src.python.options\\nReadOptions\\n(I3\\nI5\\ntR."
        print(pickle.loads(grains) == grainmill.ReadOptions(3, 5))
        print(pickle.dumps(grain.ReadOptions()).count(b"grainmill"))
    """)
    assert found == [
        "grainmill grain.sources",
        "grain.nothing",
        "grain.sources.nothing",
        "grain._src.nothing",
        "grainmill.sources grainmill",
        "True",
        importlib.metadata.version("grain"),
        "True",
        "[]",
        "True",
        "1",
    ]


class Own(grainmill.MapDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return index


def test_classes_keep_their_names_in_pickles_and_texts():
    """Keras knows a dataset by a class in its `__mro__`, which is not the class that users see."""
    for cls in (grainmill.MapDataset, grainmill.IterDataset):
        assert any(base.__module__.startswith("grain._src.python.") for base in cls.__mro__)
        assert cls.__module__.startswith("grainmill.")
        assert b"grain._src" not in pickle.dumps(cls)
        assert "_src" not in repr(cls)
    assert b"_src" not in pickle.dumps(Own())
    ds = grainmill.MapDataset.source([1, 2])
    assert list(pickle.loads(pickle.dumps(ds))) == [1, 2]
    assert "_src" not in repr(ds) + repr(ds.to_iter_dataset())


# --- private modules --------------------------------------------------------------------------


def public_classes(package):
    """Classes and functions in the public modules of Grain, or grainmill, by module and name."""
    modules = ["", ".constants", ".experimental", ".multiprocessing", ".samplers", ".sharding"]
    modules += [".sources", ".transforms", ".checkpoint", ".python", ".python.experimental"]
    found = {}
    for name in modules:
        try:
            module = importlib.import_module(package + name)
        except ModuleNotFoundError:
            continue
        names = getattr(module, "__all__", None) or dir(module)
        found |= {(name, inner): getattr(module, inner) for inner in names if inner[0] != "_"}
    return {key: value for key, value in found.items() if callable(value)}


OURS = public_classes("grainmill")
# Names of private modules that programs use, besides those of public classes.
PRIVATE = {
    ("core.constants", "INDEX"): grainmill.constants.INDEX,
    ("core.constants", "META_FEATURES"): grainmill.constants.META_FEATURES,
    ("core.sharding", "even_split"): grainmill.sharding.even_split,
    ("core.config", "config"): grainmill.config,
    ("python.data_loader", "_determine_worker_count"): None,
    ("python.dataset.transformations.source", "SourceMapDataset"): type(
        grainmill.MapDataset.source([0])
    ),
    ("python.dataset.sources.tfrecord_dataset", "_TFRecordReader"): None,
    ("python.dataset.sources.tfrecord_dataset", "_TFRecordDatasetIterator"): None,
}


def private_names():
    """Module below `grain._src` and name -> our object, of what Grain and grainmill both have."""
    found = dict(PRIVATE)
    for key, value in public_classes("grain").items():
        module = getattr(value, "__module__", None) or ""
        if module.startswith("grain._src.") and key in OURS:
            found[module.removeprefix("grain._src."), value.__name__] = OURS[key]
    return found


def test_private_modules_have_the_public_classes():
    names = private_names()
    assert len(names) > 60
    for (module, name), ours in names.items():
        assert hasattr(importlib.import_module(f"grain._src.{module}"), name), (module, name)
        found = getattr(importlib.import_module(f"grainmill._src.{module}"), name)
        assert ours is None or found is ours, (module, name)


def test_private_modules_have_nothing_else():
    names = set(private_names())
    root = pathlib.Path(grainmill.__file__).parent / "_src"
    for path in root.rglob("*.py"):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        tree = ast.parse(path.read_text("utf-8"))
        assert all(isinstance(node, ast.Expr | ast.ImportFrom | ast.Assign) for node in tree.body)
        if path.name == "__init__.py":
            assert len(tree.body) == 1
        else:
            listed = importlib.import_module(f"grainmill._src.{module}").__all__
            constants = {"DATASET_INDEX", "EPOCH", "RECORD", "RECORD_KEY", "SEED"}
            assert {(module, name) for name in set(listed) - constants} <= names


@pytest.mark.parametrize("count", [None, 0, 3])
def test_worker_count_is_grains(count):
    ours, grains = (
        importlib.import_module(f"{package}._src.python.data_loader")._determine_worker_count
        for package in ("grainmill", "grain")
    )
    assert ours(count) == grains(count)
