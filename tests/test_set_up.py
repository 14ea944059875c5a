"""What `make` sets up shows how far it is, and fails with what went wrong."""

import itertools
import os
import re
import runpy
import subprocess
import sys
import time

import pytest
import readme

SET_UP = runpy.run_path(str(readme.ROOT / ".ci/set_up.py"))
Task, Screen = SET_UP["Task"], SET_UP["Screen"]


def said_by(*lines):
    """What a task says of itself once its command has printed `lines`."""
    program = f"import sys; sys.stdout.write({chr(10).join(lines)!r})"
    task = Task("task", [sys.executable, "-c", program], {})
    task.wait()
    return task.said


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "starting"),
        (["    Updating crates.io index"], "updating"),
        (["  Downloaded zstd-sys v2.1.2 (registry)"], "downloaded"),
        (["   Compiling a v1\r    Building [=>    ] 7/186: zstd-sys(build)\r"], "7 of 186"),
        (["  Downloading jaxlib-0.10-cp311-x86_64.whl (81.2 MB)"], "jaxlib, 81.2 MB"),
        (["Using cached numpy-2.1-cp311-x86_64.whl (16 MB)"], "numpy, 16 MB"),
        (["Installing collected packages: a, b, c"], "unpacking 3 packages"),
        (["Resolved 178 packages in 1.2s"], "resolved 178 packages"),
        (["Downloading jaxlib (80.1MiB)"], "jaxlib, 80.1MiB"),
        (["Downloading jaxlib (80.1MiB)", " Downloaded jaxlib"], "downloaded"),
        (["Prepared 170 packages in 5s"], "prepared 170 packages"),
        (["\x1b[1m    Building\x1b[0m [> ] 1/2: a"], "1 of 2"),
    ],
)
def test_progress_is_read_from_what_cargo_pip_and_uv_print(lines, said):
    assert said_by(*lines) == said


def test_silence_is_no_longer_than_five_seconds(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    screen = Screen()
    task = Task("compiling", [sys.executable, "-c", ""], {})
    task.wait()
    for now in [second / 5 for second in range(300)]:
        task.said = f"{int(now) // 20} of 3"
        screen.show([task])
    lines = capsys.readouterr().out.splitlines()
    shown = [int(line.split()[0]) for line in lines]
    assert max(later - earlier for earlier, later in itertools.pairwise(shown)) <= 5
    assert len(lines) < 60
    assert lines[-1].endswith("compiling: 2 of 3")


def test_a_failure_ends_the_other_tasks_and_shows_the_last_lines(capsys):
    failing = "print('what went wrong'); raise SystemExit(3)"
    tasks = [
        Task("failing", [sys.executable, "-c", failing], {}),
        Task("endless", [sys.executable, "-c", "import time; time.sleep(600)"], {}),
    ]
    with pytest.raises(SystemExit, match="failing failed with status 3"):
        Screen().run(*tasks)
    assert "what went wrong" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="endless failed"):
        tasks[1].wait()  # it was ended, so this does not wait for ten minutes


def test_requirements_are_those_of_the_package_and_its_extras():
    requirements = SET_UP["requirements"]([None, "jax"])
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}
    assert names == {"maturin", "numpy", "cloudpickle", "jax"}


def test_uv_is_told_what_pip_is_told(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    file = tmp_path / "pip.conf"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    assert "UV_DEFAULT_INDEX" not in SET_UP["settings_of_uv"](sys.executable)
    file.write_text("[global]\nindex-url = a\ntimeout = 3\nfind-links =\n  b\n  c\n")
    monkeypatch.setenv("PIP_INDEX_URL", "it's")
    found = SET_UP["settings_of_uv"](sys.executable)
    assert (found["UV_DEFAULT_INDEX"], found["UV_FIND_LINKS"]) == ("it's", "b,c")


@pytest.mark.parametrize(
    ("status", "called"), [(0, ["uv"]), (1, ["uv", "python"]), (None, ["python"])]
)
def test_pip_stands_in_where_uv_is_missing_or_fails(tmp_path, status, called):
    for name, code in [("uv", status), ("python", 0)]:
        if code is not None:
            program = tmp_path / name
            program.write_text(f'#!/bin/sh\necho "{name} $*"\nexit {code}\n')
            program.chmod(0o755)
    command = ["/bin/sh", "-c", SET_UP["INSTALL"], str(tmp_path / "python"), "a>=1", "b"]
    found = subprocess.run(
        command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [line.split()[0] for line in found] == called
    assert all(line.endswith(" a>=1 b") for line in found)
