"""Measures how long a fresh machine takes: a table of wall and CPU seconds of each step, and sizes.

    python .ci/timings.py                    all of it, an hour
    python .ci/timings.py demo test          some of it
    python .ci/timings.py --base 4206839     another commit, to compare with

It works on a clone in a temporary folder, with empty caches of cargo, pip and uv, so the first
step of each group is cold: it downloads and compiles everything. Nothing else should run meanwhile.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE_FILE = "rust/core/src/order/mix.rs"
TOUCH = f"printf '\\n' >> {CORE_FILE} && make develop"
# Of each group: what a step is called, and its command.
GROUPS = {
    "demo": [
        ("make demo, cold", "make demo"),
        ("make demo, again", "make demo"),
    ],
    "develop": [
        ("make develop, cold", "make develop"),
        ("make develop, one file of core changed", TOUCH),
        ("make develop, nothing changed", "make develop"),
    ],
    "test": [
        ("make test, cold", "make test"),
        ("make test, again", "make test"),
        ("one test file", ".venv/bin/python -m pytest -q tests/test_slicing.py"),
    ],
    "steps": [
        ("all requirements and make develop", "make .venv/.ready"),
        *((f"make {step}", f"make {step}") for step in ("format-check", "ruff", "clippy", "deny")),
        *((f"make {step}", f"make {step}") for step in ("rust-test", "portable", "rust-doc")),
        *((f"make {step}", f"make {step}") for step in ("types", "docs", "python-test")),
    ],
    "bench": [
        ("cargo bench, cold, compile", "cargo bench --no-run"),
        ("cargo bench, measure", "cargo bench"),
    ],
    "wheel": [("make wheel, cold", "make wheel")],
}


def measured(command: str, folder: Path, environment: dict[str, str]) -> tuple[float, float, int]:
    """The wall and CPU seconds of a command in a shell, and its exit status."""
    started = time.monotonic()
    log = folder.parent / "log"
    with log.open("ab") as out:
        child = subprocess.Popen(
            ["bash", "-c", command], cwd=folder, env=environment, stdout=out, stderr=out
        )
        _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        print(log.read_text(errors="replace")[-2000:], file=sys.stderr)
    return time.monotonic() - started, usage.ru_utime + usage.ru_stime, child.returncode


def megabytes(*paths: Path) -> float:
    """The size of all files in some folders."""
    files = (file for path in paths for file in path.rglob("*") if file.is_file())
    return sum(file.stat().st_size for file in files) / 1e6


def main() -> None:
    """Prints a row for each step as it ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("groups", nargs="*", metavar="group", help=", ".join(GROUPS))
    parser.add_argument("--base", default="HEAD", help="the commit that is measured")
    options = parser.parse_args()
    if unknown := set(options.groups) - set(GROUPS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    print(f"| step, at {options.base} | wall, s | CPU, s | in caches (uv's unpacked), MB | exit |")
    print("|---|---|---|---|---|")
    for group in options.groups or GROUPS:
        with tempfile.TemporaryDirectory() as temporary:
            clone = Path(temporary) / "main"
            subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
            subprocess.run(["git", "checkout", "--quiet", options.base], cwd=clone, check=True)
            shared = ROOT.parent / "shared"
            if shared.exists():
                (clone.parent / "shared").symlink_to(shared)
            cargo, pip, uv = (Path(temporary) / name for name in ("cargo", "pip", "uv"))
            caches = {"CARGO_HOME": str(cargo), "PIP_CACHE_DIR": str(pip), "UV_CACHE_DIR": str(uv)}
            for name, command in GROUPS[group]:
                wall, cpu, status = measured(command, clone, {**os.environ, **caches})
                kept = megabytes(cargo / "registry/cache", cargo / "registry/index", pip, uv)
                print(f"| {name} | {wall:.0f} | {cpu:.0f} | {kept:.0f} | {status} |", flush=True)
            for file in (*clone.glob("python/grainmill/*.so"), *clone.glob("dist/*.whl")):
                print(f"| {file.name} | | | {file.stat().st_size / 1e6:.1f} MB of size | |")


if __name__ == "__main__":
    main()
