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
    """The test files whose imports an environment has, and how many there are."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    imports: dict[Path, set[str]] = {}
    for file in files:
        nodes = list(ast.walk(ast.parse(file.read_text("utf-8"))))
        names = [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
        names += [n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module]
        imports[file] = {name.partition(".")[0] for name in names}
    wanted = sorted(set().union(*imports.values()))
    code = "import sys; from importlib.util import find_spec; print(*filter(find_spec, sys.argv[1:]))"
    command = [python, "-c", code, *wanted]
    found = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, check=True)
    available = set(found.stdout.split()) | {path.stem for path in ROOT.rglob("tests/**/*.py")}
    return [str(f.relative_to(ROOT)) for f in files if imports[f] <= available], len(files)


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
