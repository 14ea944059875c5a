"""Processes that share the tests of one run: each test runs once, in one of them."""

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = """
import time
import pytest

@pytest.mark.parametrize("number", range(25))
def test_any(number):
    time.sleep(0.02)
    assert number != 7
"""
FILES = ["test_first.py", "test_second.py"]


def run_beside(count, folder):
    """The tests that each of the processes has run, and its exit status."""
    environment = os.environ | {
        "GRAINMILL_CLAIMS": "claims",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    command = [sys.executable, "-m", "pytest", "-p", "claims", "-p", "no:hypothesispytest", "-rA"]
    processes = [
        subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    printed = [process.communicate()[0] for process in processes]
    ran = [re.findall(r"^(?:PASSED|FAILED) (\S+)", lines, re.MULTILINE) for lines in printed]
    return list(zip(ran, [process.returncode for process in processes], strict=True))


def test_each_test_runs_in_one_of_the_processes(tmp_path):
    (tmp_path / "claims").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]")
    for name in FILES:
        (tmp_path / name).write_text(TESTS)
    found = run_beside(2, tmp_path)
    assert sorted(name for ran, _ in found for name in ran) == sorted(
        f"{file}::test_any[{number}]" for file in FILES for number in range(25)
    )
    for ran, status in found:
        assert status == int(any("[7]" in name for name in ran))
    assert run_beside(1, tmp_path) == [([], 0)]  # nothing is left
