"""The code that README.md shows."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python_blocks() -> list[str]:
    """The Python blocks of README.md, in their order."""
    text = (ROOT / "README.md").read_text("utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
