"""The pages in docs: their code runs, their outputs are true, and what they refer to exists."""

import os
import re
import subprocess
import sys

import nbclient
import nbformat
import pages
import pytest

ROOT = pages.DOCS.parent
NOTEBOOKS = sorted(pages.DOCS.glob("*.ipynb"))
SMALL = {"RECORDS": "1500", "BATCHES": "4", "BATCH_SIZE": "8", "WORKERS": "2", "STEP_S": "0.02"}
TEXTS = [*sorted(pages.DOCS.glob("*.md")), *NOTEBOOKS, ROOT / "README.md"]


def run_page(path, cwd, jax_python, timeout=240):
    python, environment = jax_python
    # Several devices on one machine, for the pages that divide batches.
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    environment = dict(
        {**os.environ, **environment},
        KERAS_BACKEND="jax",
        PYTHON=python,  # `grainmill` is beside it
        XLA_FLAGS=flags,
        PYTHONPATH=os.pathsep.join(sys.path),
    )
    return subprocess.run(
        [python, str(ROOT / "tests/pages.py"), str(path)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


# Beam starts processes that import it, and Ray a cluster; Keras takes seconds to import; the page
# on the command line runs twenty programs.
@pytest.mark.parametrize("page", [*pages.pages(), ROOT / "README.md"], ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page, tmp_path, request):
    if page.stem == "beam":
        python = request.getfixturevalue("beam_python"), {}
    else:
        python = request.getfixturevalue("jax_python")
    done = run_page(page, tmp_path, python)
    assert done.returncode == 0, done.stderr


WRONG = {
    "another output": (
        '```python\nprint("one")\n```\n\n```text title="Output"\ntwo\n```\n',
        "expected",
    ),
    "an exception": ("```python\nraise KeyError('seven')\n```\n", "seven"),
    "a program that fails": (
        '```python title="a.py"\nraise SystemExit(3)\n```\n\n```console\n$ python a.py\n```\n',
        "failed",
    ),
    "a file that nothing runs": ('```python title="a.py"\nprint(1)\n```\n', "nothing runs"),
    "an output of no code": ('```text title="Output"\n2\n```\n', "no code"),
    "an indented block": ("- list\n\n    ```python\n    1 / 0\n    ```\n", "fences"),
    "a kind without a rule": ("```py\n1 / 0\n```\n", "no rule"),
}


@pytest.mark.parametrize(("text", "complaint"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_on_a_page_is_found(text, complaint, tmp_path, jax_python):
    page = tmp_path / "page.md"
    page.write_text(text)
    done = run_page(page, tmp_path, jax_python)
    assert done.returncode == 1
    assert complaint in done.stderr


def test_blocks_of_a_page_share_their_names(tmp_path, jax_python):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nnumber = 41\n```\n\nmore\n\n```python\nprint(number + 1)\nprint('and so on')\n"
        '```\n\n```text title="Output"\n42\n...\n```\n'
    )
    done = run_page(page, tmp_path, jax_python)
    assert done.returncode == 0, done.stderr


# The comment is what the command asks for.
PROGRAM = """
import atexit, os, sys  # import jax
import grainmill
atexit.register(print, "at the end")
print(__name__, __file__, sys.argv, sys.path[0], os.getcwd(), os.environ["SAID"], sys.stdin.read())
print(grainmill.__file__)
sys.stdout.flush()
exec(sys.argv[1])
"""


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "1 / 0", "os.kill(os.getpid(), 9)"])
def test_programs_that_find_jax_imported_run_as_others(end, tmp_path, jax_python):
    (tmp_path / "program.py").write_text(PROGRAM)
    ends = [
        subprocess.run(
            [python, "program.py", end],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "SAID": end},
            input="typed",
            capture_output=True,
            text=True,
            check=False,
        )
        for python in (sys.executable, jax_python[0])
    ]
    found = [(done.returncode, done.stdout, done.stderr.splitlines()[-1:]) for done in ends]
    assert found[0] == found[1]
    assert "typed" in found[0][1]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_records_of_figures_exist(path):
    """Links within the pages are checked where the pages are built."""
    for name in re.findall(r"benches/record/[\w.-]+\.\w+", path.read_text("utf-8")):
        assert (ROOT / name).is_file(), f"{path.name} names {name}"


def test_pages_that_the_readme_names_exist():
    readme = (ROOT / "README.md").read_text("utf-8")
    links = re.findall(r"\]\((docs/[^)#]+)", readme)
    assert len(links) >= 8
    for link in links:
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook, tmp_path, monkeypatch):
    """With few records and short steps; the outputs in the file are those of a full run."""
    for name, value in SMALL.items():
        monkeypatch.setenv(f"WALKTHROUGH_{name}", value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    cells = nbformat.read(notebook, as_version=4)
    client = nbclient.NotebookClient(
        cells, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    last = [printed(cell) for cell in cells.cells if cell.cell_type == "code"]
    assert "1500" in last[1]
    assert "description_segment_ids" in last[5]
    assert "True" in last[-4]
    assert "Grain Dataset graph:" in "".join(last)
    assert "FirstFitPackDatasetIterator" in "".join(last)
    assert "of the wait" in "".join(last)
    waited = [float(share) for share in re.findall(r"waited ([\d.]+)%", "".join(last))]
    assert len(waited) == 3


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_shows_its_outputs(notebook):
    for cell in nbformat.read(notebook, as_version=4).cells:
        if cell.cell_type == "code" and not cell.source.startswith("import"):
            assert printed(cell), cell.source


def printed(cell):
    """The text below a cell of a notebook."""
    texts = [output.get("text") or output["data"]["text/plain"] for output in cell.outputs]
    return "".join(texts)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_no_page_imports_what_is_private_or_lets_a_shell_read_brackets(path):
    text = path.read_text("utf-8")
    assert not re.search(r"^(?:from|import) grainmill\._", text, flags=re.MULTILINE)
    assert not re.search(r"pip install [^'\"\n]*\[", text)
