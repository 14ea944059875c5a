"""The wheel installs into an empty environment of any Python on the machine and works there."""

import os
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import readme
from effort import LONG

DESCRIBES_ITSELF = """
import sys, sysconfig
assert sys.implementation.name == "cpython" and sys.version_info >= (3, 11)
assert not sysconfig.get_config_var("Py_GIL_DISABLED")  # these cannot load abi3 wheels
print(sys.base_prefix, sys.version.split()[0])
"""

AS_GRAIN = """
import importlib.metadata
grain.install_as_grain()
import grain.python
print(importlib.metadata.version("grain"), grain.python.__name__)
"""


def interpreters() -> dict[str, str]:
    """Version and path of each CPython from 3.11 on -> a command that starts it."""
    folders = [Path(folder) for folder in os.get_exec_path()]
    folders += Path.home().glob(".pyenv/versions/3.*/bin")
    names = ["python3", "python3.[1-9][0-9]"]
    commands = [sys.executable]
    commands += sorted(str(p) for folder in folders for name in names for p in folder.glob(name))
    found = {}
    for command in commands:
        done = subprocess.run(
            [command, "-c", DESCRIBES_ITSELF], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            prefix, version = done.stdout.rsplit(maxsplit=1)
            found.setdefault(f"{version} in {prefix}", command)
    return found


def run(*command, **options):
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    # The profile for which `make develop` has compiled all but the last step.
    profile = "release" if LONG else "dev"
    maturin = [sys.executable, "-m", "maturin", "build", "--profile", profile, "--locked"]
    maturin += ["--out", out]
    run(*maturin, cwd=readme.ROOT, timeout=1200)
    (built,) = out.glob("*.whl")
    return built


INTERPRETERS = interpreters()


def oldest_and_newest_minor_version():
    """All interpreters, those but the first one of these two for `make test-long`."""
    first = {}
    for version in INTERPRETERS:
        first.setdefault(tuple(map(int, version.split(".")[:2])), version)
    chosen = {first[min(first)], first[max(first)]}
    return [
        pytest.param(version, marks=[] if version in chosen else [pytest.mark.long])
        for version in INTERPRETERS
    ]


@pytest.mark.timeout(1500)  # Includes the build, unless it is cached.
@pytest.mark.parametrize("version", oldest_and_newest_minor_version())
def test_readme_pipelines_run_from_the_wheel(version, wheel, tmp_path):
    run(INTERPRETERS[version], "-m", "venv", "--without-pip", tmp_path / "env")
    python = tmp_path / "env/bin/python"
    # Only what is imported is compiled, by who imports it.
    install = ["install", "--quiet", "--no-compile", wheel]
    run(sys.executable, "-m", "pip", "--python", python, *install)
    isolated = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    blocks = [block for block in readme.python_blocks() if "jax" not in block]  # is not installed
    assert len(blocks) == 3
    lines = ["import grainmill as grain", *blocks, AS_GRAIN, "print(grain.__file__)"]
    found = run(python, "-I", "-W", "error", "-c", "\n".join(lines), cwd=tmp_path, env=isolated)
    assert "'tokens': (16, 128)" in found
    assert found.splitlines()[-2] == "0.2.18 grainmill.python"
    assert str(tmp_path) in found.splitlines()[-1]


@pytest.mark.timeout(1500)
def test_wheel_carries_the_licences_of_all_it_links(wheel):
    with zipfile.ZipFile(wheel) as files:
        (dist_info,) = {name.split("/")[0] for name in files.namelist() if ".dist-info/" in name}
        for name in ("LICENSE", "THIRD-PARTY-LICENSES.txt"):
            assert files.read(f"{dist_info}/licenses/{name}") == (readme.ROOT / name).read_bytes()
        headers = files.read(f"{dist_info}/METADATA").decode().splitlines()
    assert "License-File: THIRD-PARTY-LICENSES.txt" in headers


def test_licences_are_those_of_the_crates_that_are_linked_now():
    script = runpy.run_path(str(readme.ROOT / ".ci/third_party_licenses.py"))
    found = (readme.ROOT / "THIRD-PARTY-LICENSES.txt").read_text("utf-8")
    assert script["document"]() == found, "run .ci/third_party_licenses.py"
    for crate in ("brotli", "highway", "numpy", "pyo3", "snap", "zstd-sys"):
        assert f"\n{crate} " in found


def test_wheel_serves_every_python_from_3_11_on(wheel):
    assert "-cp311-abi3-" in wheel.name
