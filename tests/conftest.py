"""Settings shared by all tests: what is marked, and noise of the real Grain that is let by."""

import contextlib

import pytest
from under_test import IS_GRAIN


def pytest_configure(config):
    with contextlib.suppress(ImportError):  # another system
        import resource  # noqa: PLC0415

        # As many files are held open as this allows, which tests have to exceed.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 4096), hard))
    config.addinivalue_line(
        "markers",
        "better_than_grain(reason): what Grain 0.2.18 gets wrong; expected to fail there only",
    )
    if IS_GRAIN:
        # Grain's iterators raise from `__del__` when the interpreter or a test tears them down.
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
