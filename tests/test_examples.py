"""The programs that users start from do what they say."""

import os
import re
import subprocess
import sys

import readme


def run(*command, cwd):
    environment = dict(os.environ, JAX_PLATFORMS="cpu")
    # So that the process that resumes need not compile the same again.
    environment["JAX_COMPILATION_CACHE_DIR"] = str(cwd / "compiled")
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Takes the time of JAX and its compiler, as does the next one: they train models.
def test_text_example_resumes_with_equal_batches(tmp_path):
    found = run(str(readme.ROOT / "examples/text_pipeline.py"), "--quick", cwd=tmp_path)
    assert "its 6 batches are bit-identical" in found
    assert (tmp_path / ".cache/text_pipeline/resumed.json").exists()


def test_image_example_learns(tmp_path):
    found = run(str(readme.ROOT / "examples/images.py"), "--quick", cwd=tmp_path)
    before, after = (float(x) for x in re.findall(r"accuracy .*: ([\d.]+)%", found))
    assert after > max(before, 40)
    assert "the next batch is bit-identical" in found
