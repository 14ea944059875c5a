"""Restores states in a process of its own: prints what is left after each.

The argument is a file with `{stage: {place: state}}`.
"""

import json
import sys
from pathlib import Path

from effort import LONG
from pipelines import close, take
from stages import make
from under_test import grain


def remaining(stage, states):
    """The elements after each of `states`, or how restoring it failed."""
    found, iterator = {}, None
    places = list(states)
    middle = len(places) // 2
    # New iterators are to begin with a state in the middle.
    for place in places[middle:] + places[:middle]:
        try:
            # Starting the processes of an iterator takes longer than everything else.
            if iterator is None or LONG or "mp_prefetch" not in stage:
                close(iterator)
                iterator = iter(make(grain, stage))
            iterator.set_state(states[place])
            found[place] = take(iterator, None)
        except Exception as error:
            found[place] = f"{type(error).__name__}: {error}"
    close(iterator)
    return found


def main():
    states = json.loads(Path(sys.argv[1]).read_text())
    json.dump({stage: remaining(stage, places) for stage, places in states.items()}, sys.stdout)


if __name__ == "__main__":
    main()
