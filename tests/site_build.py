"""Builds the documentation for the tests of it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def build(directory):
    """Builds the pages as `make docs` does, into a directory of the test's own."""
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(directory)],
        cwd=ROOT,
        env=dict(os.environ, NO_MKDOCS_2_WARNING="1", PYTHONPATH=os.pathsep.join(sys.path)),
        check=True,
    )
