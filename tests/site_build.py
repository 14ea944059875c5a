"""The built documentation, for the tests of it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def site(directory):
    """Where the pages are: what `make docs` has built, or else built into `directory`."""
    built = ["make", "--silent", "--question", "target/site/search/search_index.json"]
    if subprocess.run(built, cwd=ROOT, check=False).returncode == 0:
        return ROOT / "target/site"
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(directory)],
        cwd=ROOT,
        env=dict(os.environ, NO_MKDOCS_2_WARNING="1", PYTHONPATH=os.pathsep.join(sys.path)),
        check=True,
    )
    return directory
