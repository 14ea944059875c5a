"""The programs that users start from do what they say."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(tmp_path, jax_python):
    """Runs a program in `tmp_path` and returns what it prints."""

    def run(program, *options, python=jax_python[0]):
        done = subprocess.run(
            [python, str(EXAMPLES / program), *options],
            cwd=tmp_path,
            env={**os.environ, **jax_python[1]},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


# Takes the time of JAX and its compiler, as do those that follow: they train models.
def test_text_example_resumes_with_equal_batches(run, tmp_path):
    found = run("text_pipeline.py", "--quick", "--batch-size", "2")
    assert "its 6 batches are bit-identical" in found
    assert (tmp_path / ".cache/text_pipeline/resumed.json").exists()


def test_image_example_learns(run):
    found = run("images.py", "--quick")
    before, after = (float(x) for x in re.findall(r"accuracy .*: ([\d.]+)%", found))
    assert after > max(before, 40)
    assert "the next batch is bit-identical" in found


def test_image_folders_example_learns_the_same_from_one_file(run):
    program = "image_folders.py"
    options = ("--steps", "60", "--batch-size", "16")
    from_folders = run(program, *options)
    accuracies = re.findall(r"accuracy ([\d.]+)%", from_folders)
    assert len(accuracies) == 5
    assert float(accuracies[-1]) > 80
    from_one_file = run(program, *options, "--convert")
    assert re.findall(r"accuracy ([\d.]+)%", from_one_file) == accuracies


def test_image_folders_example_takes_folders_of_any_images(tmp_path):
    images = EXAMPLES.parent / "tests/data/images"
    for number, name in enumerate(("baseline_420.jpg", "rgb.png")):
        (tmp_path / f"class_{number}").mkdir()
        shutil.copy(images / name, tmp_path / f"class_{number}")
    (tmp_path / "class_0/notes.txt").write_text("not an image")
    program = runpy.run_path(str(EXAMPLES / "image_folders.py"))
    items, names = program["listed"](tmp_path)
    assert names == ["class_0", "class_1"]
    paths = [tmp_path / "class_0/baseline_420.jpg", tmp_path / "class_1/rgb.png"]
    assert items == [(str(path), label) for label, path in enumerate(paths)]
    with pytest.raises(SystemExit, match="no folders of JPEG or PNG images"):
        program["listed"](tmp_path / "class_0")


def test_mixture_example_trains_from_a_bucket_and_resumes(run):
    found = run("mixture_from_buckets.py", "--steps", "10", "--rows", "4")
    assert "70% from 2 files: s3://corpus/web/*.array_record" in found
    assert "30% from 2 files: s3://corpus/code/*.tfrecord" in found
    first, last = map(float, re.findall(r"loss ([\d.]+)", found))
    assert last < 0.8 * first
    assert "resumed at step 5: 5 batches are the same" in found


# Six processes, one after another in pairs, that import JAX and Orbax.
def test_hosts_example_goes_on_where_it_stopped(run):
    found = run("hosts_with_orbax.py", "--steps", "12")
    assert "stopped after step 6" in found
    assert "went on with step 5" in found  # the last step that was saved is 4
    assert "all losses are those of a run that never stopped" in found


def test_torch_example_resumes_or_says_what_it_needs(run):
    program = "torch_loop.py"
    python = os.environ.get("GRAINMILL_PYTHON_WITH_MORE", sys.executable)
    found = run(program, "--steps", "20", python=python)
    if "needs PyTorch" not in found:
        assert "resumed at step 10: all 10 losses are the same" in found


def test_each_example_is_tested_and_listed():
    examples = {path.name for path in EXAMPLES.glob("*.py")}
    tests = Path(__file__).read_text("utf-8")
    page = (EXAMPLES / "README.md").read_text("utf-8")
    assert {name for name in examples if f'"{name}"' in tests} == examples
    assert set(re.findall(r"\]\((\w+\.py)\)", page)) == examples
