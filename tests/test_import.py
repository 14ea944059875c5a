"""What importing the package imports, and flags of programs that import absl later or never."""

import dataclasses
import json
import pickle
import threading
from typing import ClassVar

import pytest
from effort import cases
from worker_harness import run_script

from grainmill._lazy_dataclass import lazy_dataclass
from grainmill._plan.node import Node
from grainmill._stages.limit import Limit
from grainmill._stages.repeat import Repeat
from grainmill._workers import launch

# Optional packages, and parts of the standard library and NumPy that take milliseconds each and
# that building a pipeline does not need.
STAY_OUT = (
    *("jax", "orbax", "flax", "pyarrow", "absl", "tensorflow", "etils", "prometheus_client"),
    *("asyncio", "concurrent.futures", "multiprocessing", "subprocess", "socket", "tempfile"),
    *(
        "json",
        "pathlib",
        "importlib.abc",
        "importlib.resources",
        "numpy.random",
        "statistics",
        "xml",
    ),
)


def printed(program, tmp_path=None):
    done = run_script(program, tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(("extra", "package"), [("beam", "apache_beam"), ("ray", "ray")])
def test_modules_for_an_optional_package_say_how_to_install_it(extra, package):
    program = f"""
import sys
sys.modules["{package}"] = None
for _ in range(2):
    try:
        import grainmill.{extra}
    except ImportError as error:
        print("pip install 'grainmill[{extra}]'" in str(error))
"""
    assert printed(program) == ["True", "True"]


@pytest.mark.parametrize("module", ["grainmill", "grainmill.experimental"])
def test_importing_leaves_out_what_is_not_needed(module):
    """Compared with NumPy alone: another tool may import modules when the interpreter starts."""
    program = "import numpy, sys\nbefore = set(sys.modules)\n{}\nprint(*set(sys.modules) - before)"
    added = set(printed(program.format(f"import {module}")))
    assert {"grainmill", "grainmill._dataset.map_dataset"} <= added
    assert not added & set(STAY_OUT)
    others = {name for name in added if not name.startswith(("grainmill", "numpy"))}
    assert len(others) < 40, sorted(others)


def test_names_are_imported_when_they_are_used():
    program = """
import grainmill, sys
assert "grainmill._loader.data_loader" not in sys.modules
assert "grainmill._dataset.elastic.iterator" not in sys.modules
assert {"DataLoader", "experimental", "checkpoint"} <= set(dir(grainmill))
assert {"experimental", "checkpoint", "multiprocessing", "sources"} <= vars(grainmill).keys()
from grainmill import DataLoader, experimental, sources
assert grainmill.DataLoader is DataLoader
assert grainmill.experimental.pick_performance_config
assert all(getattr(grainmill, name) is not None for name in grainmill.__all__)
try:
    grainmill.Dataset
except AttributeError as error:
    print(error)
"""
    assert printed(program)[-1] == "'Dataset'"


@pytest.mark.parametrize("first", ["absl.flags", "grainmill"])
def test_flags_are_defined_whichever_is_imported_first(first):
    second = {"absl.flags": "grainmill", "grainmill": "absl.flags"}[first]
    program = f"""
import {first}
import {second}
import grainmill, sys
from absl import flags
from absl.testing import flagsaver
config = grainmill.config
assert config.py_debug_mode is False
flags.FLAGS(["program", "--grain_py_traceback_filtering=off"])
assert config.py_traceback_filtering == "off"
with flagsaver.flagsaver(grain_py_debug_mode=True):
    print(config.py_debug_mode)
print(config.py_debug_mode, config.tf_lookup_batch_size)
config.update("tf_lookup_batch_size", 7)
print(flags.FLAGS.grain_tf_lookup_batch_size)
assert not [finder for finder in sys.meta_path if type(finder).__name__ == "_WhenImported"]
"""
    assert printed(program) == ["True", "False", "100", "7"]


def test_an_update_before_absl_is_imported_counts():
    program = """
import grainmill
grainmill.config.update("py_traceback_filtering", "off")
from absl import flags
flags.FLAGS(["program"])
print(grainmill.config.py_traceback_filtering)
"""
    assert printed(program) == ["off"]


def test_settings_work_without_absl():
    program = """
import sys
sys.modules["absl"] = None
import grainmill
grainmill.config.update("py_debug_mode", True)
print(grainmill.config.py_debug_mode)
try:
    import absl.flags
except ImportError:
    print("missing")
"""
    assert printed(program) == ["True", "missing"]


# --- node classes -----------------------------------------------------------------------------


def test_unused_node_classes_generate_nothing():
    program = """
import grainmill
from grainmill._iterators.base.node import SequentialNode
from grainmill._lazy_dataclass import _Fields
classes = [SequentialNode]
for kind in classes:
    classes += kind.__subclasses__()
print(sum(isinstance(vars(c).get("__dataclass_fields__"), _Fields) for c in classes) > 15)
"""
    assert printed(program) == ["True"]


def test_node_classes_are_frozen_dataclasses():
    @lazy_dataclass
    class First(Node):
        size: int
        name: str = dataclasses.field(default="x", kw_only=True)
        shown: ClassVar[int] = 1

    @lazy_dataclass
    class Second(First):
        more: int = 3

    @dataclasses.dataclass(frozen=True, eq=False, repr=False)
    class Third(Second):
        last: int = 4

    third = Third((), 1)
    assert (third.size, third.more, third.last, third.name) == (1, 3, 4, "x")
    names = ["parents", "added_at", "size", "name", "more", "last"]
    assert [field.name for field in dataclasses.fields(Third)] == names
    assert dataclasses.replace(Second((), 1), size=2).size == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        third.size = 5
    with pytest.raises(TypeError):
        First(())
    assert First((), 1) != First((), 1)


def test_a_pickled_node_arrives_where_its_class_was_never_used():
    node = Limit.of(Repeat((), 2), 3)
    program = f"""
import dataclasses, pickle
limit = pickle.loads({pickle.dumps(node)!r})
print(dataclasses.replace(limit, count=4).count, limit.parent.num_epochs, limit)
"""
    assert printed(program)[:2] == ["4", "2"]


def test_threads_may_use_a_node_class_first_at_the_same_time():
    for _ in range(50):

        @lazy_dataclass
        class New(Node):
            size: int

        made, start = [], threading.Barrier(4)

        def make(new=New, made=made, start=start):
            start.wait()
            made.append(new((), 1).size)

        threads = [threading.Thread(target=make) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert made == [1] * 4


TOGETHER = """
import importlib, importlib.util, json, random, sys, threading
launch_file, seed = sys.argv[1:]
spec = importlib.util.spec_from_file_location("launch", launch_file)
launch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launch)
package = launch.lazy_package()
for module in ("_workers.worker", "_workers.zygote"):
    importlib.import_module(f"grainmill.{module}")
draw = random.Random(seed)
names = ["__version__", "MapDataset", "DataLoader", "ReadOptions", "experimental", "config"]
modules = ["checkpoint", "sources", "multiprocessing", "python", "transforms", "array_record"]
ways = [lambda name=name: getattr(package, name) for name in names]
ways += [lambda name=name: importlib.import_module(f"grainmill.{name}") for name in modules]
barrier = threading.Barrier(12)
failures = []

def use(way, wait_s):
    barrier.wait()
    threading.Event().wait(wait_s)
    try:
        way()
    except Exception as failure:
        failures.append(repr(failure))

draw.shuffle(ways)
waits = [draw.choice([0, 0, 0.01, 0.05, 0.1]) for _ in ways]
threads = [threading.Thread(target=use, args=each, daemon=True) for each in zip(ways, waits)]
[thread.start() for thread in threads]
[thread.join(60) for thread in threads]
print(json.dumps([failures, sum(thread.is_alive() for thread in threads)]))
"""


@pytest.mark.parametrize("seed", range(cases(3, 100)))
def test_threads_of_a_worker_may_use_the_package_first_at_the_same_time(seed, tmp_path):
    """There it is imported when a function first uses it."""
    done = run_script(TOGETHER, tmp_path, args=[launch.__file__, str(seed)])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], 0]
