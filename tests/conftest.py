"""Settings shared by all tests: a marker, and warnings of the real Grain that are ignored."""

import contextlib

import pytest
from under_test import IS_GRAIN


def pytest_configure(config):
    with contextlib.suppress(ImportError):  # another system
        import resource  # noqa: PLC0415

        # grainmill keeps as many files open as this allows, and tests have to exceed it.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 4096), hard))
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


def pytest_collection_modifyitems(items):
    if not IS_GRAIN:
        return
    for item in items:
        mark = item.get_closest_marker("better_than_grain")
        if mark is not None:
            item.add_marker(pytest.mark.xfail(reason=mark.args[0], strict=False))
