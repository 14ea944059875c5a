"""Writes the licences of everything that the compiled module links: `THIRD-PARTY-LICENSES.txt`.

Run it after a change of Cargo.lock; `tests/test_wheel.py` fails where the file is out of date.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET_FILE = ROOT / "THIRD-PARTY-LICENSES.txt"
# Wheels are built for these.
TARGETS = [
    *("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"),
    *("x86_64-unknown-linux-musl", "aarch64-unknown-linux-musl"),
    *("x86_64-apple-darwin", "aarch64-apple-darwin", "x86_64-pc-windows-msvc"),
]
LICENSE_FILE = re.compile(r"(licen[sc]e|copying|copyright|notice)", re.IGNORECASE)
# Sources in another language that a crate brings along: the folder with their licence.
BUNDLED = {"liblzma-sys": ["xz"], "zstd-sys": ["zstd"]}
# Offered beside a licence that is taken instead, or of programs beside the library.
NOT_TAKEN = {
    ("zstd-sys", "zstd/COPYING"),
    *(("liblzma-sys", f"xz/COPYING{end}") for end in ("", ".GPLv2", ".GPLv3", ".LGPLv2.1")),
}

MIT = """\
Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
associated documentation files (the "Software"), to deal in the Software without restriction,
including without limitation the rights to use, copy, modify, merge, publish, distribute,
sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or
substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,
DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT
OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE."""

# Crates that are published without the text of their licence: that of a crate from the same
# repository or under the same licence, or the licence and the authors that they name.
TEXT_OF = {
    "alloc-stdlib": "alloc-no-stdlib",
    "crc-catalog": "crc",
    "flatbuffers": "arrow-ipc",
}
NAMES_ONLY = {"highway": f"MIT License\n\nCopyright (c) Nick Babcock\n\n{MIT}"}

STANDARD_LIBRARY = f"""\
The Rust standard library, MIT OR Apache-2.0; taken under MIT

Copyright (c) The Rust Project Contributors

{MIT}"""


def cargo(*arguments: str) -> str:
    """What a command of cargo prints."""
    command = ["cargo", *arguments, "--locked"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def linked() -> list[dict]:
    """The packages whose code ends up in the module, without this workspace's own."""
    packages = json.loads(cargo("metadata", "--format-version", "1"))["packages"]
    by_name = {(p["name"], p["version"]): p for p in packages if p["source"]}
    found = set()
    for target in TARGETS:
        tree = cargo(
            *("tree", "--package", "grainmill-py", "--features", "pyo3/extension-module"),
            *("--edges", "no-dev,no-build,no-proc-macro", "--prefix", "none"),
            *("--target", target, "--format", "{p}"),
        )
        for line in filter(None, tree.splitlines()):
            name, version = line.split()[:2]
            found.add((name, version.removeprefix("v")))
    return [by_name[key] for key in sorted(found) if key in by_name]


def texts_of(package: dict, packages: list[dict]) -> list[str]:
    """The licences of a package, and of what it brings along, as its authors wrote them."""
    name = package["name"]
    if name in NAMES_ONLY:
        return [NAMES_ONLY[name]]
    if name in TEXT_OF:
        (package,) = (p for p in packages if p["name"] == TEXT_OF[name])
    folder = Path(package["manifest_path"]).parent
    texts = []
    for place in [folder, *(folder / sub for sub in BUNDLED.get(name, []))]:
        files = sorted(f for f in place.iterdir() if f.is_file() and LICENSE_FILE.match(f.name))
        files = [f for f in files if (name, str(f.relative_to(folder))) not in NOT_TAKEN]
        if not files:
            sys.exit(f"{place} has no licence: add it to `TEXT_OF` or `NAMES_ONLY`")
        texts += [f.read_text("utf-8") for f in files]
    return ["\n".join(line.rstrip() for line in text.strip().splitlines()) for text in texts]


def document() -> str:
    """All of the file: equal texts once, below the packages that have them."""
    packages = linked()
    users: dict[str, list[str]] = {}
    for package in packages:
        title = f"{package['name']} {package['version']}, {package['license']}"
        for text in texts_of(package, packages):
            titles = users.setdefault(text, [])
            if title not in titles:
                titles.append(title)
    rule = "=" * 80
    parts = [
        "What the compiled module of grainmill links, and under which licences.",
        STANDARD_LIBRARY,
    ]
    parts += ["\n".join(titles) + f"\n\n{text}" for text, titles in users.items()]
    return f"\n\n{rule}\n\n".join(parts) + "\n"


if __name__ == "__main__":
    TARGET_FILE.write_text(document(), "utf-8")
