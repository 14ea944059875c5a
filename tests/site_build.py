"""The built documentation, for the tests of it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILT = ROOT / "target/site"


def site(directory):
    """Where the pages are: what `make docs` has built, or else built into `directory`."""
    if is_current():
        return BUILT
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(directory)],
        cwd=ROOT,
        env=dict(os.environ, NO_MKDOCS_2_WARNING="1", PYTHONPATH=os.pathsep.join(sys.path)),
        check=True,
    )
    return directory


def is_current():
    """Whether all pages have been built since what they are made of has changed.

    `make docs` removes what was there, and writes the index of the search last.
    """
    if not (BUILT / "search/search_index.json").exists():
        return False
    inputs = [
        *ROOT.glob("*.md"),
        ROOT / "mkdocs.yml",
        *(ROOT / "docs").rglob("*"),
        *(ROOT / "python").rglob("*"),
    ]
    changed = (path.stat().st_mtime for path in inputs if "__pycache__" not in path.parts)
    return max(changed) < min(path.stat().st_mtime for path in BUILT.rglob("*.html"))
