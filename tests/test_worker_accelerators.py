"""Worker processes use JAX on the CPU only, and run neither the main script nor its job set-up."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("jax")
pytestmark = pytest.mark.better_than_grain("the tests start workers of grainmill")

# A platform that JAX prefers to the CPU. Opening it is recorded, as it would take an accelerator.
PLUGIN = """
import os, pathlib

def opened():
    from jax._src.lib import xla_client
    with pathlib.Path(os.environ["OPENED"]).open("a") as file:
        file.write(f"{os.getpid()}\\n")
    return xla_client.make_cpu_client()

def initialize():
    from jax._src import xla_bridge
    xla_bridge.register_backend_factory("accelerator", opened, priority=500)
"""

USERS = """
import os, sys
import jax
import grainmill as grain

DISTRIBUTED = "no"
if os.environ.get("DISTRIBUTED"):  # a module that joins the job when it is imported
    jax.distributed.initialize("localhost:1", num_processes=2, process_id=0)
    DISTRIBUTED = "returned"

def platform():
    jax.devices()
    opened = os.environ["OPENED"]
    by = open(opened).read().split() if os.path.exists(opened) else ()
    return "accelerator" if str(os.getpid()) in by else "cpu"

def look(x):
    return {
        "pid": os.getpid(),
        "platform": platform(),
        "sum": float(jax.numpy.arange(4.0).sum()),
        "platforms": os.environ.get("JAX_PLATFORMS", ""),
        "distributed": DISTRIBUTED,
        "processes": jax.process_count(),
        "main": sorted(vars(sys.modules["__main__"])),
    }

class Look(grain.transforms.Map):
    def map(self, x):
        return look(x)

def choose(worker, num_workers):
    os.environ["JAX_PLATFORMS"] = "accelerator,cpu"

def configure(worker, num_workers):
    jax.config.update("jax_platforms", "accelerator,cpu")
"""

# Each entrance to worker processes as the elements that it returns.
ENTRANCES = {
    "read": "grain.MapDataset.range(2).map(users.look).to_iter_dataset("
    "grain.ReadOptions(num_workers=1, worker_init_fn={init}))",
    "mp_prefetch": "grain.MapDataset.range(2).to_iter_dataset().map(users.look).mp_prefetch("
    "grain.MultiprocessingOptions(num_workers=1), {init})",
    "loader": "grain.DataLoader(data_source=range(2), sampler=grain.samplers.SequentialSampler(2), "
    "operations=[users.Look()], worker_count=1)",
}

MAIN = """
import json, os, sys
with open(os.environ["RAN"], "a") as file:
    file.write("ran\\n")
OWN_NAME = 1
import grainmill as grain
{before}
import users
{elements_of}
print(json.dumps([os.getpid(), elements]))
"""

# Stands for `users` in the main process, which then takes no time to import JAX.
WITHOUT_JAX = """
class Lazy:
    def __getattr__(self, name):
        def call(*args):
            import users
            return getattr(users, name)(*args)
        return call
    class Look(grain.transforms.Map):
        def map(self, x):
            import users
            return users.look(x)
users = sys.modules["users"] = Lazy()
"""


@pytest.fixture
def program(tmp_path):
    """Runs a program with the platform `accelerator`; returns what the workers saw."""
    plugin = tmp_path / "jax_plugins" / "fake"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(PLUGIN)
    (tmp_path / "users.py").write_text(USERS)

    def run(*entrances, init=None, before="", **environment):
        lists = [f"*{ENTRANCES[entrance].format(init=init)}" for entrance in entrances]
        elements_of = f"elements = [{', '.join(lists)}]"
        main = tmp_path / "main.py"
        main.write_text(MAIN.format(before=before, elements_of=elements_of))
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
        paths = [str(tmp_path), *filter(None, sys.path)]
        process = subprocess.run(
            [sys.executable, str(main)],
            capture_output=True,
            text=True,
            check=False,
            env={
                **inherited,
                "OPENED": str(tmp_path / "opened"),
                "RAN": str(tmp_path / "ran"),
                "PYTHONPATH": os.pathsep.join(paths),
                **environment,
            },
        )
        assert process.returncode == 0, process.stderr
        pid, elements = json.loads(process.stdout)
        assert all(element["pid"] != pid for element in elements)
        assert len(elements) == 2 * len(entrances)
        assert (tmp_path / "ran").read_text() == "ran\n", "the main script ran more than once"
        assert all("OWN_NAME" not in element["main"] for element in elements)
        opened = tmp_path / "opened"
        by = set(opened.read_text().split()) if opened.exists() else set()
        return pid, elements, by, process.stderr

    return run


def platforms(elements):
    assert {element["sum"] for element in elements} == {6.0}
    return {element["platform"] for element in elements}


@pytest.mark.parametrize(
    ("entrances", "inherited"),
    [(["read"], ""), (["mp_prefetch", "loader"], "accelerator,cpu")],
    ids=["by itself", "as told"],
)
def test_worker_uses_the_cpu_while_the_main_process_has_the_accelerator(
    program, entrances, inherited
):
    used = "import users; assert users.platform() == 'accelerator'"
    pid, elements, by, _ = program(*entrances, before=used, JAX_PLATFORMS=inherited)
    assert platforms(elements) == {"cpu"}
    assert {element["platforms"] for element in elements} == {"cpu"}
    assert by == {str(pid)}, "a worker has opened the accelerator"


def test_worker_uses_the_cpu_where_the_main_process_never_imports_jax(program):
    _, elements, by, _ = program("read", before=WITHOUT_JAX)
    assert platforms(elements) == {"cpu"}
    assert not by


@pytest.mark.parametrize(
    ("entrance", "init"), [("read", "users.choose"), ("mp_prefetch", "users.configure")]
)
def test_worker_init_fn_may_choose_the_accelerator(program, entrance, init):
    _, elements, by, _ = program(entrance, init=init, before=WITHOUT_JAX)
    assert platforms(elements) == {"accelerator"}
    assert by == {str(element["pid"]) for element in elements}


@pytest.mark.parametrize(
    ("option", "inherited", "expected"),
    [
        ("accelerator,cpu", "", "accelerator"),
        ("", "accelerator,cpu", "accelerator"),
        ("", "cpu", "cpu"),
    ],
)
def test_environment_may_choose_the_platforms_of_workers(program, option, inherited, expected):
    environment = {"JAX_PLATFORMS": inherited, "GRAINMILL_WORKER_JAX_PLATFORMS": option}
    _, elements, _, _ = program("loader", before=WITHOUT_JAX, **environment)
    assert platforms(elements) == {expected}


def test_jax_that_the_interpreter_imports_at_its_start_uses_the_cpu_in_workers(program, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import jax\n")
    _, elements, by, _ = program("read")
    assert platforms(elements) == {"cpu"}
    assert not by


def test_worker_does_not_join_the_job_a_second_time(program):
    """A module that is imported in workers, too, may call `jax.distributed.initialize`."""
    joined = "import jax; initialize = jax.distributed.initialize; calls = []\n"
    joined += "jax.distributed.initialize = lambda *a, **k: calls.append(a)"
    _, elements, _, log = program(*ENTRANCES, before=joined, DISTRIBUTED="1")
    assert {element["distributed"] for element in elements} == {"returned"}
    assert {element["processes"] for element in elements} == {1}
    warning = "`jax.distributed.initialize` is ignored in a worker process"
    assert log.count(warning) >= len(ENTRANCES)


def test_the_main_process_keeps_its_own_initialize(tmp_path):
    """Only workers replace it, and the module keeps its loader."""
    code = """
    import inspect, os
    from grainmill._workers import accelerators
    import jax
    original = jax.distributed.initialize
    assert original.__module__.startswith("jax."), original
    assert "JAX_PLATFORMS" not in os.environ
    accelerators.restrict_jax()
    assert jax.distributed.initialize is not original
    jax.distributed.initialize("nowhere:1", 2, 1)
    assert inspect.getsource(jax.distributed)
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(tmp_path),
        env=environment,
    )
    assert done.returncode == 0, done.stderr
