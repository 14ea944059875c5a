"""The examples in docstrings show what happens."""

import doctest
import inspect

import numpy as np
import pytest
from under_test import experimental, grain

from grainmill import array_record

pytestmark = pytest.mark.better_than_grain("these are our docs")

MODULES = [
    grain,
    experimental,
    grain.multiprocessing,
    grain.samplers,
    grain.sharding,
    grain.sources,
    grain.transforms,
    array_record,
]
PUBLIC = {
    name: getattr(module, name)
    for module in MODULES
    for name in getattr(module, "__all__", dir(module))
    if not name.startswith("_") and not inspect.ismodule(getattr(module, name))
}
NAMES = {**PUBLIC, "np": np}


def examples():
    """The examples of all public names, each once."""
    found = {}
    for name, documented in PUBLIC.items():
        for test in doctest.DocTestFinder().find(documented, name, globs=dict(NAMES)):
            if test.examples:
                found.setdefault((test.docstring, test.lineno), test)
    return list(found.values())


@pytest.mark.parametrize("example", examples(), ids=lambda test: test.name)
def test_example_shows_what_happens(example, tmp_path, monkeypatch):
    if "jax" in example.docstring:
        pytest.importorskip("jax")
    monkeypatch.chdir(tmp_path)
    assert doctest.DocTestRunner().run(example).failed == 0


def test_examples_are_found():
    names = {example.name.partition(".")[0] for example in examples()}
    assert {"MapDataset", "DataLoader", "ArrayRecordDataSource", "ArrayRecordReader"} <= names
