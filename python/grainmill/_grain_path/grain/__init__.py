"""Replaces itself with grainmill when it is imported; see `grainmill._as_grain`."""

import importlib
import importlib.util
import pathlib
import sys

if importlib.util.find_spec("grainmill") is None:  # another Python, which inherited the path
    _PATH = str(pathlib.Path(__file__).parent.parent)
    sys.path[:] = [entry for entry in sys.path if entry != _PATH]
    del sys.modules[__name__]
    importlib.import_module(__name__)
else:
    importlib.import_module("grainmill._as_grain").register()
