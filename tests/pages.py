"""The code of the pages in docs: `python tests/pages.py PAGE.md` runs it and compares outputs.

The Python blocks of a page run in order, as one program in an empty directory. A block with a title
is a file of that name instead, which a later `console` block runs. A `text` block with the title
"Output" is what the block before it prints, `...` standing for any text. Commands of a `console`
block find the number of a free port in `$PORT`.
"""

import contextlib
import dataclasses
import doctest
import io
import os
import re
import socket
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
# Each section of it is a program, of which `test_recipes.py` runs those whose library is installed.
RECIPES = DOCS / "recipes.md"
# Shown, and neither run nor compared.
SHOWN = {"sh", "text", "json"}
# The text of some pages is that of Python's standard library: elsewhere, numbers are others.
PYTHON_OF_OUTPUTS = (3, 11)
_FENCED = re.compile(
    r'^```(?P<kind>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<body>.*?)^```$',
    flags=re.MULTILINE | re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block: the word after the fence, its title, and the line where its body starts."""

    kind: str
    title: str | None
    body: str
    line: int

    @property
    def is_output(self):
        return self.kind == "text" and self.title == "Output"


def pages():
    """The pages whose code is one program."""
    found = sorted(path for path in DOCS.glob("*.md") if _FENCED.search(path.read_text("utf-8")))
    return [path for path in found if path != RECIPES]


def blocks_of(text):
    """All fenced blocks of a page; raises a `ValueError` for one that would be overlooked."""
    blocks = []
    for found in _FENCED.finditer(text):
        line = text.count("\n", 0, found.start("body"))
        blocks.append(Block(found["kind"], found["title"], found["body"], line))
    fences = len(re.findall(r"```|~~~", text))
    if fences != 2 * len(blocks):
        raise ValueError(f"{len(blocks)} blocks, but {fences} fences: one is indented or untitled")
    for previous, block in zip([None, *blocks], blocks, strict=False):
        if block.kind not in {"python", "console", *SHOWN}:
            raise ValueError(f"line {block.line}: no rule for a block of kind `{block.kind}`")
        if block.is_output and (previous is None or previous.kind != "python" or previous.title):
            raise ValueError(f"line {block.line}: an output of no code")
    commands = "".join(block.body for block in blocks if block.kind == "console")
    for block in blocks:
        if block.kind == "python" and block.title is not None and block.title not in commands:
            raise ValueError(f"line {block.line}: nothing runs the file `{block.title}`")
    return blocks


def run(path):
    """Runs a page's code in the current directory; raises an `AssertionError` on other output."""
    # A module of its own, in which classes and functions are found as in a program.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    out = io.StringIO()  # one for all blocks, as a logger may keep it
    printed = ""
    for block in blocks_of(path.read_text("utf-8")):
        if block.kind == "python" and block.title is not None:
            Path(block.title).write_text(block.body, "utf-8")
        elif block.kind == "python":
            # Tracebacks, and the notes of errors, show lines of the page.
            code = compile("\n" * block.line + block.body, str(path), "exec")
            start = out.tell()
            with contextlib.redirect_stdout(out):
                exec(code, vars(main))
            printed = out.getvalue()[start:]
        elif block.kind == "console":
            for command, expected in sessions(block.body):
                compare(expected, result_of(command), f"{path}, line {block.line}: `{command}`")
        elif block.is_output:
            compare(block.body, printed, f"{path}, line {block.line}")


def sessions(body):
    """The commands of a console block, each with the output shown below it."""
    for session in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        command, _, expected = session.partition("\n")
        yield command, expected


def result_of(command):
    python = os.environ.get("PYTHON", sys.executable)
    binaries = [str(Path(python).parent), sysconfig.get_path("scripts")]
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    path = os.pathsep.join([*binaries, os.environ["PATH"]])
    environment = dict(os.environ, PATH=path, PORT=port)
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, f"`{command}` failed:\n{done.stdout}{done.stderr}"
    return done.stdout


def compare(expected, found, place):
    if sys.version_info[:2] != PYTHON_OF_OUTPUTS:
        expected, found = (re.sub(r"\d+(?:[.,]\d+)*", "0", text) for text in (expected, found))
    same = doctest.OutputChecker().check_output(expected, found, doctest.ELLIPSIS)
    assert same, f"{place}: expected\n{expected}\nfound\n{found}"


if __name__ == "__main__":
    run(Path(sys.argv[1]).absolute())
