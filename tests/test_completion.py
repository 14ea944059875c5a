"""What `dir` and an interpreter's completion show of the public modules."""

import importlib
import pathlib
import pkgutil
import pydoc
import rlcompleter
import subprocess
import sys

import pytest

import grainmill

OPTIONAL = {"beam", "jax", "ray"}
MODULES = [
    "grainmill",
    *(
        f"grainmill.{module.name}"
        for module in pkgutil.iter_modules(grainmill.__path__)
        if not module.name.startswith("_")
    ),
]


def imported(name):
    if name.rpartition(".")[2] in OPTIONAL:
        pytest.importorskip({"beam": "apache_beam"}.get(name.rpartition(".")[2], name[10:]))
    return importlib.import_module(name)


@pytest.mark.parametrize("name", MODULES)
def test_dir_has_the_public_names_and_no_others(name):
    module = imported(name)
    names = {shown for shown in dir(module) if not shown.startswith("_")}
    assert names == {public for public in module.__all__ if not public.startswith("_")}
    for public in names:
        assert getattr(module, public) is not None


@pytest.mark.parametrize("name", MODULES)
def test_the_interactive_interpreter_completes_them(name):
    module = imported(name)
    completer = rlcompleter.Completer({"module": module})
    found = set()
    while (text := completer.complete("module.", len(found))) is not None:
        found.add(text)
    names = {text.removeprefix("module.").rstrip("(").removesuffix("()") for text in found}
    assert {public for public in module.__all__ if not public.startswith("_")} <= names
    assert not names & {"importlib", "TYPE_CHECKING", "hashlib", "operator"}


FACTORIES = {
    grainmill.MapDataset: {"concatenate", "mix", "range", "select_from_datasets", "source"},
    grainmill.IterDataset: {"mix"},
}


@pytest.mark.parametrize("kind", FACTORIES, ids=str)
def test_factories_of_datasets_are_listed(kind):
    assert FACTORIES[kind] <= set(dir(kind))
    assert {"batch", "describe", "map"} <= set(dir(kind))
    text = pydoc.plain(pydoc.render_doc(kind))
    for name in [*FACTORIES[kind], "describe"]:
        assert f" {name}(" in text, name
    made = grainmill.MapDataset.range(3)
    assert not {"source", "range", "select_from_datasets"} & set(dir(made))  # of the class only


def test_the_reference_has_what_classes_have_from_elsewhere():
    griffe = pytest.importorskip("griffe")
    root = pathlib.Path(__file__).parents[1]
    package = griffe.load(
        "grainmill",
        search_paths=[str(root / "python")],
        extensions=griffe.load_extensions(str(root / "docs/docstrings.py")),
    )
    for kind, names in FACTORIES.items():
        members = package[kind.__name__].members
        assert {*names, "describe", "batch", "parents", "pipe"} <= set(members)
        assert all(members[name].docstring.value for name in names)
    assert package["__version__"].docstring is None


PROGRAM = """
import warnings
import grainmill as grain
from IPython.core.interactiveshell import InteractiveShell

warnings.simplefilter("ignore")
from IPython.core.completer import provisionalcompleter

shell = InteractiveShell.instance()
shell.push({"grain": grain})

def completed(text):
    with provisionalcompleter():
        found = [one.text for one in shell.Completer.completions(text, len(text))]
    found = {one.removeprefix(text).removeprefix(".") for one in found}
    return {one for one in found if not one.startswith("_")}

for shell.Completer.use_jedi in (False, True):
    how = f"with use_jedi={shell.Completer.use_jedi}"
    for module in ("sources", "experimental", "transforms", "checkpoint"):
        found = completed(f"grain.{module}.")
        public = getattr(grain, module).__all__
        assert found == set(public), (how, module, found ^ set(public))
    ds = grain.MapDataset.range(3).to_iter_dataset()
    shell.push({"ds": ds})
    assert {"batch", "describe", "filter", "map"} <= completed("ds."), (how, completed("ds."))
    assert {"mix", "range", "source"} <= completed("grain.MapDataset."), how
"""


def test_ipython_completes_them(tmp_path):
    pytest.importorskip("IPython")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"IPYTHONDIR": str(tmp_path), "PATH": "", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
