"""Checks that a folder holds every file of a release, and that they belong to its version."""

import argparse
import os
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Each in two wheels: for all versions from 3.11 on, and for free-threaded Python 3.14.
PLATFORMS = [
    r"manylinux2014_x86_64\.manylinux_2_17_x86_64",
    r"manylinux2014_aarch64\.manylinux_2_17_aarch64",
    r"musllinux_1_2_x86_64",
    r"musllinux_1_2_aarch64",
    r"macosx_\d+_\d+_x86_64",
    r"macosx_\d+_\d+_arm64",
    r"win_amd64",
]
ABIS = ["cp311-abi3", "cp314-cp314t"]


def version() -> str:
    """The version in Cargo.toml, which is that of the package."""
    cargo = tomllib.loads((ROOT / "Cargo.toml").read_text("utf-8"))
    found: str = cargo["workspace"]["package"]["version"]
    return found


def problems(names: list[str], tag: str) -> list[str]:
    """What is wrong with the files of a release; `tag` is empty where there is none."""
    number = re.escape(version())
    expected = [rf"grainmill-{number}\.tar\.gz"]
    expected += [
        rf"grainmill-{number}-{abi}-{platform}\.whl" for abi in ABIS for platform in PLATFORMS
    ]
    found = [f"no file {e}" for e in expected if not any(re.fullmatch(e, n) for n in names)]
    found += [
        f"unexpected file {n}" for n in names if not any(re.fullmatch(e, n) for e in expected)
    ]
    if tag and tag != f"v{version()}":
        found.append(f"the tag is {tag}, the version {version()}")
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    if tag and not re.search(rf"^## {number} - \d{{4}}-\d\d-\d\d$", changes, re.MULTILINE):
        found.append(f"CHANGELOG.md has no section `## {version()} - YYYY-MM-DD`")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    names = sorted(file.name for file in parser.parse_args().folder.iterdir())
    sys.exit("\n".join(problems(names, os.environ.get("TAG", ""))))
