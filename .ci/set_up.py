"""Sets up `.venv` and builds the package into it, side by side, and shows how far both are.

    python .ci/set_up.py --build demo --extras jax

The line that it shows is rewritten in a terminal; elsewhere one is printed every few seconds.
"""

import argparse
import ast
import collections
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
# Options of cargo. The demo needs neither buckets nor Parquet nor images, which most of the compile
# time would go into.
BUILDS = {
    "demo": ["--profile", "demo", "--no-default-features", "--features", "abi3"],
    "develop": ["--profile", "dev"],
    "release": ["--release"],
}
# Takes a sixth of the time of pip, which installs it, and does the rest where it fails.
UV = "uv>=0.8,<1"
INSTALL = """
uv pip install --python "$0" "$@" && exit
exec "$0" -m pip install --progress-bar off --no-compile "$@"
"""
# By option of pip that says where packages come from: the variable of uv, what separates values.
UV_VARIABLES = {
    "cert": ("SSL_CERT_FILE", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "no-index": ("UV_NO_INDEX", " "),
}


class Task:
    """A command that runs beside others, and the last thing that it said of itself."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self.said = "starting"
        self.lines: collections.deque[str] = collections.deque(maxlen=200)
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        line = b""
        with self._process.stdout as out:
            while chunk := os.read(out.fileno(), 1 << 16):
                *lines, line = re.split(rb"[\r\n]", line + chunk)
                for text in lines:
                    self._take(text)
        self._take(line)

    def _take(self, text: bytes) -> None:
        line = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", text.decode(errors="replace"))
        if match := re.search(r"Building \[.*\] (\d+)/(\d+)", line):
            self.said = f"{match[1]} of {match[2]}"
        elif line.strip():
            self.lines.append(line)
            if match := re.match(r"\s*(?:Downloading|Using cached) ([^-/ ]+)\S* \((.*)\)", line):
                self.said = f"{match[1]}, {match[2]}"
            elif match := re.match(r"(Resolved|Prepared|Installed) \d+ packages", line):
                self.said = match[0].lower()
            elif match := re.match(r"\s*(Updating|Downloaded) ", line):
                self.said = match[1].lower()
            elif line.startswith("Installing collected packages"):
                self.said = f"unpacking {line.count(',') + 1} packages"

    def poll(self) -> int | None:
        """The exit status, once there is one."""
        return self._process.poll()

    def wait(self) -> None:
        """Exits with the output of the command if it failed."""
        status = self._process.wait()
        self._reader.join()
        if status:
            print("\n".join(["", *self.lines]))
            sys.exit(f"{self.name} failed with status {status}; its last lines are above")

    def stop(self) -> None:
        """Ends the command."""
        self._process.terminate()


class Screen:
    """The line that says how far the tasks are."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._shown = ("", 0.0)

    def show(self, tasks: list[Task]) -> None:
        """Shows how far `tasks` are, if that is news or nothing was shown for some seconds."""
        text = "; ".join(f"{task.name}: {task.said}" for task in tasks)
        now = time.monotonic()
        last, at = self._shown
        line = f"{now - self._started:3.0f} s  {text}"
        if sys.stdout.isatty():
            width = os.get_terminal_size().columns - 1
            print(f"\r\x1b[K{line[:width]}", end="", flush=True)
        elif now - at > (2 if text != last else 4):
            print(line, flush=True)
            self._shown = (text, now)

    def run(self, *tasks: Task) -> None:
        """Shows `tasks` until all have ended; if one fails, the others are ended."""
        running = list(tasks)
        try:
            while running:
                self.show(running)
                time.sleep(0.2)
                for task in [task for task in running if task.poll() is not None]:
                    running.remove(task)
                    task.wait()
        finally:
            for task in running:
                task.stop()
        if sys.stdout.isatty():
            print()


def requirements(extras: list[str | None]) -> list[str]:
    """What `pyproject.toml` requires for `extras`; None: to build the package and to run it."""
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    project = stated["project"]
    by_extra = {
        None: stated["build-system"]["requires"] + project["dependencies"],
        **project["optional-dependencies"],
    }
    return [requirement for extra in extras for requirement in by_extra[extra]]


def settings_of_uv(python: Path | str) -> dict[str, str]:
    """What pip is told of where packages come from, as variables of uv."""
    listed = subprocess.run(
        [python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    # The variables of pip come first, and go before its files.
    settings = reversed(re.findall(r"^.*?\.([a-z-]+)=(.*)$", listed, re.MULTILINE))
    found = {}
    for option, value in settings:
        if option in UV_VARIABLES:
            name, separator = UV_VARIABLES[option]
            found[name] = separator.join(ast.literal_eval(value).split())
    return found


def installed(packages: list[str]) -> Task:
    """Installs packages; what of them is imported is compiled to bytecode then."""
    path = f"{PYTHON.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**settings_of_uv(PYTHON), "PATH": path, "PIP_QUIET": "0"}
    return Task("installing", ["sh", "-c", INSTALL, str(PYTHON), *packages], environment)


def built(build: str) -> Task:
    """Compiles the package and makes it importable."""
    command = [str(VENV / "bin/maturin"), "develop", "--locked", *BUILDS[build]]
    progress = {"CARGO_TERM_PROGRESS_WHEN": "always", "CARGO_TERM_PROGRESS_WIDTH": "100"}
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        os.environ.pop("PYO3_CONFIG_FILE", None)  # that of the stable interface, which it lacks
    return Task("compiling", command, {"VIRTUAL_ENV": str(VENV), **progress})


def main() -> None:
    """Makes the environment if there is none, then installs and builds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", choices=BUILDS, help="what is compiled")
    parser.add_argument("--extras", nargs="*", default=[], help="of pyproject.toml")
    options = parser.parse_args()
    if options.build and not shutil.which("cargo"):
        sys.exit("no Rust toolchain found; see https://rustup.rs")
    screen = Screen()
    if not (VENV / "bin/maturin").exists():
        screen.run(Task("making .venv", [sys.executable, "-m", "venv", str(VENV)], {}))
        screen.run(installed([UV, *requirements([None])]))
    tasks = [built(options.build)] if options.build else []
    if options.extras:
        tasks.append(installed(requirements([None, *options.extras])))
    screen.run(*tasks)


if __name__ == "__main__":
    main()
