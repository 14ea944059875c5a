"""Several processes run the tests of one `make test`, each what it is the first to claim.

A test is claimed by a file in the folder `GRAINMILL_CLAIMS`. Every other process begins at the end,
so two of them share no file of tests but the one where they meet. (pytest-xdist took twice the time
of a test that does nothing, and a process that only prints.)
"""

import hashlib
import itertools
import os
from pathlib import Path

# What a test starts runs all of its own tests.
FOLDER = os.environ.pop("GRAINMILL_CLAIMS", None)


def pytest_runtestloop(session):
    if not FOLDER or session.testsfailed or session.config.option.collectonly:
        return None  # what pytest does: all tests, none after errors of collecting them
    mine = _claimed(session.items, Path(FOLDER).absolute())
    item = next(mine, None)
    while item is not None:
        following = next(mine, None)
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True


def _claimed(items, folder):
    def is_first(what):
        try:
            (folder / hashlib.sha256(what.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    number = next(number for number in itertools.count() if is_first(f"process {number}"))
    for item in items if number % 2 == 0 else reversed(items):
        if is_first(item.nodeid):
            yield item
