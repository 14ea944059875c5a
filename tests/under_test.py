"""The module under test: grainmill, or the one named by GRAINMILL_TEST_MODULE.

`GRAINMILL_TEST_MODULE=grain pytest tests` runs the same tests with the real Grain, which checks
the tests themselves. Known defects of Grain are marked `better_than_grain`.
"""

import importlib
import os

NAME = os.environ.get("GRAINMILL_TEST_MODULE", "grainmill")
IS_GRAIN = NAME == "grain"

grain = importlib.import_module(NAME)
experimental = importlib.import_module(f"{NAME}.experimental")

INLINE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
