"""How much the tests search: little in `make test`, as much as hours allow in `make test-long`.

A test that only searches longer takes its number of cases from `cases`, or is marked `long` and
then runs in `make test-long` alone.
"""

import os

LONG = bool(os.environ.get("GRAINMILL_LONG"))
# Searches that count their cases begin so many later: another number tries others.
SEED = int(os.environ.get("GRAINMILL_SEED", "0"))


def cases(quick: int, long: int) -> int:
    """The number of cases to try: `quick` in `make test`, `long` in `make test-long`."""
    return long if LONG else quick
