"""Runs the tests on each CPython found, and with the oldest NumPy and JAX that the package allows.

    python .ci/other_versions.py             all; hours
    python .ci/other_versions.py --oldest    the oldest requirements alone

A test file that imports what an environment lacks is left out there, and counted.
"""

import argparse
import ast
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from release_check import TEST_REQUIREMENTS, built, environment, interpreters, step

ROOT = Path(__file__).parents[1]
# These start programs, or import parts of the package, that need more of the test extra.
STARTS_MORE = {
    *("test_as_grain", "test_convert", "test_docs", "test_drawing", "test_examples"),
    *("test_graph_parity", "test_import", "test_names", "test_tools", "test_types", "test_wheel"),
}
# What the package requires, and the extra without which few tests of arrays on devices run.
OLDEST = {"numpy", "cloudpickle", "jax"}


def oldest_requirements() -> list[str]:
    """The lower bounds of the package itself and of its extra `jax`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    stated = project["dependencies"] + project["optional-dependencies"]["jax"]
    bounds = [re.match(r"([\w-]+)>=([\d.]+)", requirement) for requirement in stated]
    found = {bound[1]: bound[2] for bound in bounds if bound}
    assert set(found) == OLDEST, found
    return [
        f"{name}=={version}{'.0' * (2 - version.count('.'))}" for name, version in found.items()
    ]


def runnable(python: Path) -> tuple[list[str], int]:
    """The test files for which an environment has all they import, and how many files there are."""
    modules = {path.stem: path for path in sorted((ROOT / "tests").rglob("*.py"))}
    imports = {name: imported(path) for name, path in modules.items()}
    wanted = sorted(set().union(*imports.values()) - set(modules))
    code = "import sys, importlib.util as u; print(*filter(u.find_spec, sys.argv[1:]))"
    command = [python, "-c", code, *wanted]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lacking = set(wanted) - set(found.stdout.split())
    while more := {name for name, names in imports.items() if names & lacking} - lacking:
        lacking |= more
    if lacking:
        lacking |= STARTS_MORE
    files = {name: path for name, path in modules.items() if name.startswith("test_")}
    return [str(p.relative_to(ROOT)) for n, p in files.items() if n not in lacking], len(files)


def imported(path: Path) -> set[str]:
    """The packages and modules that a file imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.partition(".")[0] for name in names}


def tested(name: str, python: Path, scratch: Path) -> bool:
    """Whether the tests that an environment can run pass."""
    files, total = runnable(python)
    print(f"{name}: {len(files)} of {total} files of tests", flush=True)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={scratch}"]
    return subprocess.run([*command, *files], cwd=ROOT, check=False).returncode == 0


def main() -> None:
    """Exits with the names of the environments in which a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--oldest", action="store_true", help="the oldest requirements alone")
    options = parser.parse_args()
    pythons = {version: path for version, path in interpreters().items() if version[-1] != "t"}
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheel = built(folder / "wheel", "--profile", "dev")
        environments = {"the oldest requirements": (min(pythons), oldest_requirements())}
        if not options.oldest:
            environments |= {f"Python {v}": (v, [f"{wheel}[test]"]) for v in sorted(pythons)}
        for name, (version, requirements) in environments.items():
            with step(name):
                own = folder / re.sub(r"\W", "-", name)
                needed = [wheel, *TEST_REQUIREMENTS, *requirements]
                python = environment(pythons[version], own, *needed)
                if not tested(name, python, folder / "scratch"):
                    failed.append(name)
    if failed:
        sys.exit(f"tests failed with {', '.join(failed)}")


if __name__ == "__main__":
    main()
