"""See `pytest.py`."""

import sys

from pytest import Decorator  # noqa: PT013 - the one beside this

given = settings = strategies = HealthCheck = example = Decorator()
sys.modules["hypothesis.strategies"] = sys.modules["hypothesis.extra"] = strategies
