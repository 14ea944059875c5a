"""Builds what a release consists of, as far as a Linux machine can, and tries it.

Wheels for glibc and musl on two processors are linked by zig, so that they ask for no newer library
than their names say, and audited. The one for this machine, the source distribution, and one for
each free-threaded Python found are installed into empty environments and tested there.
"""

import argparse
import contextlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).parents[1]
# Of Rust, of the wheel.
TARGETS = {
    "x86_64-unknown-linux-gnu": "manylinux_2_17",
    "aarch64-unknown-linux-gnu": "manylinux_2_17",
    "x86_64-unknown-linux-musl": "musllinux_1_2",
    "aarch64-unknown-linux-musl": "musllinux_1_2",
}
# Those of the C library, under its two names, and of the compiler.
ALLOWED_LIBRARIES = {
    *("libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1"),
    *("ld-linux-aarch64.so.1", "ld-linux-x86-64.so.2", "libc.so", "libgcc_s.so.1"),
}
# The smaller files: each layer, with threads and workers.
TESTS = [
    *("test_concat_split", "test_golden_vectors", "test_lists", "test_other_systems"),
    *("test_packing", "test_slicing", "test_stages", "test_thread_prefetch", "test_worker_tasks"),
]
TEST_REQUIREMENTS = ["hypothesis", "psutil", "pytest", "pytest-timeout"]
DESCRIBES_ITSELF = """
import ensurepip, sys, sysconfig, venv
assert sys.implementation.name == "cpython" and sys.version_info >= (3, 11)
free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
assert not free_threaded or sys.version_info >= (3, 14)
print(f"{sys.version_info.major}.{sys.version_info.minor}{'t' * free_threaded}")
"""


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Prints how long a step took."""
    started = time.monotonic()
    print(f"{name} ...", flush=True)
    yield
    print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)


def run(*command: object, **options: object) -> str:
    """What a command prints; exits with all of it if the command fails."""
    words = list(map(str, command))
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}")
    return str(done.stdout)


def interpreters() -> dict[str, str]:
    """A command for each version of CPython from 3.11 on; free-threaded ones end in `t`."""
    folders = [Path(folder) for folder in os.get_exec_path()]
    folders += sorted(Path.home().glob(".pyenv/versions/3.*/bin"))
    named = (p for folder in folders for p in sorted(folder.glob("python3*")))
    commands = [sys.executable]
    commands += [str(p) for p in named if re.fullmatch(r"python3(\.\d+)?t?", p.name)]
    found: dict[str, str] = {}
    for command in commands:
        described = [command, "-c", DESCRIBES_ITSELF]
        done = subprocess.run(described, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found.setdefault(done.stdout.strip(), command)
    return found


def built(out: Path, *options: str) -> Path:
    """The one wheel that maturin builds with `options`."""
    run(sys.executable, "-m", "maturin", "build", "--locked", "--out", out, *options, cwd=ROOT)
    (wheel,) = out.glob("*.whl")
    return wheel


def audited(wheel: Path, out: Path) -> None:
    """Exits if `wheel` needs more of a system than its name says."""
    if libraries := needed(wheel) - ALLOWED_LIBRARIES:
        sys.exit(f"{wheel.name} needs {libraries}")
    (tag,) = re.findall(r"(?:many|musl)linux_\d+_\d+_\w+", wheel.stem)
    if tag.startswith("musl"):
        return  # maturin has audited its symbols; auditwheel wants musl itself
    auditwheel = [sys.executable, "-m", "auditwheel"]
    shown = run(*auditwheel, "show", wheel)
    if f'"{tag}"' not in shown:
        sys.exit(f"{wheel.name} is not one for {tag}:\n{shown}")
    run(*auditwheel, "repair", "--plat", "auto", "-w", out, wheel)
    (repaired,) = out.glob("*.whl")
    with zipfile.ZipFile(repaired) as files:
        copied = [name for name in files.namelist() if ".libs/" in name]
    if copied:
        sys.exit(f"{wheel.name} needs libraries that not every system of {tag} has: {copied}")


def needed(wheel: Path) -> set[str]:
    """The libraries that the compiled module in `wheel` is linked to."""
    with zipfile.ZipFile(wheel) as files:
        (module,) = (name for name in files.namelist() if name.endswith(".so"))
        dynamic = ELFFile(io.BytesIO(files.read(module))).get_section_by_name(".dynamic")
        return {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}


def environment(python: str, folder: Path, *requirements: object) -> Path:
    """The interpreter of a new environment with only `requirements` in it."""
    run(python, "-m", "venv", folder)
    isolated = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", **os.environ}
    isolated.pop("PYTHONPATH", None)
    command = [folder / "bin/python", "-m", "pip", "install", "--quiet", *requirements]
    run(*command, cwd=folder, env=isolated)
    return folder / "bin/python"


def tried(python: Path) -> str:
    """What `.ci/installed.py` says in an environment, without this tree in sight."""
    with tempfile.TemporaryDirectory() as folder:
        return run(python, "-I", ROOT / ".ci/installed.py", cwd=folder)


def tested(python: Path, folder: Path) -> str:
    """The last line of the part of the tests that runs in each version of Python."""
    tests = [f"tests/{name}.py" for name in TESTS]
    isolated = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={folder}"]
    printed = run(python, "-m", "pytest", *options, *tests, cwd=ROOT, env=isolated)
    return printed.strip().splitlines()[-1]


def source_distribution(dist: Path, folder: Path) -> None:
    """Builds the package from its sources where there is no git and nothing is set up."""
    run(sys.executable, "-m", "maturin", "sdist", "--out", dist, cwd=ROOT)
    (archive,) = dist.glob("*.tar.gz")
    without_git = folder / "bin"
    without_git.mkdir()
    for name in ("cargo", "rustc", "cc", "gcc", "ar", "ld", "as", "sh", "python3"):
        if found := shutil.which(name):
            (without_git / name).symlink_to(found)
    run(sys.executable, "-m", "venv", folder / "env")
    isolated = {**os.environ, "PATH": str(without_git), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    for name in ("PYTHONPATH", "CARGO_TARGET_DIR", "VIRTUAL_ENV", "PYO3_PYTHON"):
        isolated.pop(name, None)
    python = folder / "env/bin/python"
    run(python, "-m", "pip", "install", "--quiet", archive, cwd=folder, env=isolated)
    print(tried(python), end="")


def main() -> None:
    """All steps, in the order of how much they find; exits at the first failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dist", type=Path, default=ROOT / "target/release-check/dist")
    parser.add_argument("--profile", default="release", help="of cargo, for all wheels")
    dist: Path = parser.parse_args().dist
    profile = ["--profile", parser.parse_args().profile]
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)
    pythons = interpreters()
    print("CPython", *sorted(pythons))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        own = None
        for target, kind in TARGETS.items():
            with step(f"wheel for {kind}, {target}"):
                run("rustup", "target", "add", target)
                options = ["--zig", "--compatibility", kind, "--target", target]
                wheel = built(folder / target, *profile, *options)
                audited(wheel, folder / f"{target}-audited")
                shutil.copy(wheel, dist)
                if target == f"{platform.machine()}-unknown-linux-gnu":
                    own = dist / wheel.name
        for version in sorted(pythons):
            wheel = own
            with step(f"Python {version}"):
                if version.endswith("t"):
                    wheel = built(folder / version, *profile, "-i", pythons[version])
                    shutil.copy(wheel, dist)
                python = environment(
                    pythons[version], folder / f"env{version}", wheel, *TEST_REQUIREMENTS
                )
                print(tried(python), tested(python, folder / f"tests{version}"), sep="")
        with step("source distribution"):
            source_distribution(dist, folder)
        with step("metadata"):
            run(sys.executable, "-m", "twine", "check", "--strict", *sorted(dist.iterdir()))
    print("release-check passed:", *sorted(file.name for file in dist.iterdir()), sep="\n  ")


if __name__ == "__main__":
    main()
