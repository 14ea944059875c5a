"""`grainmill.experimental` under its older place."""

from grainmill.experimental import *  # noqa: F403
from grainmill.experimental import __all__ as __all__  # noqa: PLC0414
