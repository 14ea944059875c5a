"""Settings shared by all tests: a marker, warnings that are ignored, what runs on which system."""

import contextlib
import gc
import os
import signal
import sys
from pathlib import Path

import effort
import hypothesis
import pytest
import warm_python
from claims import pytest_runtestloop  # noqa: F401 - a hook
from under_test import IS_GRAIN
from waits import becomes

SYSTEM = os.environ.get("GRAINMILL_IMITATE", sys.platform)  # see `other_system`
# These run on every system. The others start processes, or read what only Linux tells of them.
ON_EVERY_SYSTEM = {
    *("test_batch_stack", "test_concat_split"),
    *(
        "test_golden_vectors",
        "test_index_file",
        "test_laziness",
        "test_oracle",
        "test_other_systems",
    ),
    *("test_packing", "test_program", "test_shared_memory_array"),
    *("test_slicing", "test_stages", "test_storage", "test_thread_policy", "test_thread_prefetch"),
    "test_workflows",
}
# These wait most of the time: for servers that are silent, processes that start, signals, clusters.
# `make python-test` runs them in a process of their own, beside those that keep the cores busy.
WAITING = {
    *("test_bad_files", "test_bad_servers", "test_bucket_outputs", "test_buckets"),
    *("test_device_put", "test_drawing"),
    *("test_executor", "test_exit", "test_far_sources", "test_lifetime"),
    *("test_other_systems", "test_parquet_far", "test_ray", "test_secrets", "test_shared_index"),
    *("test_stalls", "test_stats", "test_storage_interrupts", "test_streams"),
    *("test_threads_in_workers", "test_tools", "test_untrusted_servers"),
    "test_worker_tracebacks",
}
# What the processes that tests start find in place of pytest, which takes them long to import.
IN_WORKERS = str(Path(__file__).with_name("in_workers"))
SHARE = os.environ.get("GRAINMILL_TESTS")  # "waiting", "computing", or both


def pytest_ignore_collect(collection_path):
    name = collection_path.stem
    if SHARE and name.startswith("test_") and (name in WAITING) != (SHARE == "waiting"):
        return True
    if SYSTEM != "linux" and name.startswith("test_") and name not in ON_EVERY_SYSTEM:
        return True
    return None


def pytest_configure(config):
    if SYSTEM != "linux":
        config.addinivalue_line(
            "filterwarnings", "ignore:worker processes need Linux:RuntimeWarning"
        )
    # On a busy machine any example may take long.
    hypothesis.settings.register_profile("at any pace", deadline=None)
    hypothesis.settings.load_profile("at any pace")
    effort.start_quickly()
    effort.compile_quickly()
    # Begun in the background by a shell, the tests and what they start would ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(ImportError):  # another system
        import resource  # noqa: PLC0415

        # grainmill keeps as many files open as this allows, and tests have to exceed it.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 4096), hard))
    config.addinivalue_line("markers", "long: only searches longer; runs in `make test-long`")
    config.addinivalue_line(
        "markers",
        "better_than_grain(reason): a defect of Grain 0.2.18; expected to fail only with Grain",
    )
    if IS_GRAIN:
        # Grain's iterators raise in `__del__` at the end of a test or of the interpreter.
        config.addinivalue_line(
            "filterwarnings", "default::pytest.PytestUnraisableExceptionWarning"
        )
        config.addinivalue_line(
            "filterwarnings", "default::pytest.PytestUnhandledThreadExceptionWarning"
        )


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    gc.disable()  # what tests import stays
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    # Millions of objects of what the tests import, which every `gc.collect()` would visit.
    gc.collect()
    gc.freeze()
    if not effort.LONG:
        gc.set_threshold(20_000)  # collecting at the usual 700 takes 4 % of the time of all tests
    sys.path.insert(0, IN_WORKERS)


def _are_gone():
    starter = sys.modules.get("grainmill._workers.starter")
    current = starter and starter._starters._current
    return current is None or not current._zygotes


@pytest.fixture(scope="module", autouse=True)
def _no_workers_are_left():
    """The last test of a file that leaves workers fails, not one of a file that counts them."""
    yield
    if not becomes(_are_gone, 0.5):
        gc.collect()
        assert becomes(_are_gone), "tests of this file have left workers"


@pytest.fixture(scope="session")
def jax_python(tmp_path_factory):
    """A command for programs with JAX, and what its environment has to have besides."""
    with warm_python.started(tmp_path_factory.mktemp("python")) as found:
        yield found


@pytest.fixture(scope="session")
def beam_python(tmp_path_factory):
    """A command for programs with Beam."""
    with warm_python.beam_started(tmp_path_factory.mktemp("beam")) as found:
        yield found


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call():
    # The pools of all tests may share what starts their workers, unless the environment changes.
    os.environ["PYTEST_CURRENT_TEST"] = "one of them"


def pytest_sessionfinish():
    sys.path[:] = [entry for entry in sys.path if entry != IN_WORKERS]


def pytest_collection_modifyitems(config, items):
    if not effort.LONG:
        by_length = {True: [], False: []}
        for item in items:
            by_length[item.get_closest_marker("long") is not None].append(item)
        config.hook.pytest_deselected(items=by_length[True])
        items[:] = by_length[False]
    if not IS_GRAIN:
        return
    for item in items:
        mark = item.get_closest_marker("better_than_grain")
        if mark is not None:
            item.add_marker(pytest.mark.xfail(reason=mark.args[0], strict=False))
