"""Stands for pytest and hypothesis in the processes of tests, which import a test's module.

They do so for its functions alone, and importing what decorates its tests would take them longer
than all else. What a function that runs there could call of pytest is missing on purpose.
"""

import importlib


class Decorator:
    """All that is done with a mark, a fixture or a strategy while a module is imported."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_, **__):
        return self

    def __or__(self, _):
        return self


mark = fixture = param = Decorator()


def importorskip(name, **_):
    return importlib.import_module(name)
