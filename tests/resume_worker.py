"""Restores states in a process of its own: prints what is left after each.

The argument is a file with `{stage: {place: state}}`.
"""

import json
import sys
from pathlib import Path

from pipelines import close, take
from stages import make
from under_test import grain


def remaining(stage, state):
    """The elements after `state`, or how restoring it failed."""
    try:
        iterator = iter(make(grain, stage))
        iterator.set_state(state)
        found = take(iterator, None)
        close(iterator)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return found


def main():
    states = json.loads(Path(sys.argv[1]).read_text())
    found = {
        stage: {place: remaining(stage, state) for place, state in places.items()}
        for stage, places in states.items()
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
