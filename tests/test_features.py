"""A build without the optional parts says what is missing, and everything else works."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import grainmill
from grainmill import _native

PACKAGE = Path(grainmill.__file__).parent
ROOT = Path(__file__).parents[1]
TRIED = {
    "buckets": [
        "grain.sources.ArrayRecordDataSource('s3://bucket/file')",
        "grain.sources.ArrayRecordDataSource('gs://bucket/file*')",
        "grain.sources.TFRecordDataSource(['https://me:secret@host/file?sig=secret'])",
        "ArrayRecordWriter('s3://bucket/file').close()",
        "_native.ObjectWriter('s3://bucket/file')",
    ],
    "images": ["grain.transforms.DecodeImage()", "grain.transforms.DecodeRandomCrop(size=(8, 8))"],
    "parquet": ["grain.sources.ParquetDataSource('rows.parquet')[0]"],
}
PROGRAM = """
import json, sys
import grainmill as grain
from grainmill import _native
from grainmill.array_record import ArrayRecordReader, ArrayRecordWriter

with ArrayRecordWriter("here") as writer:
    writer.write(b"record")
assert ArrayRecordReader("here").read_all() == [b"record"]
said = []
for text in json.loads(sys.argv[1]):
    try:
        said.append(f"nothing, but {eval(text)}")
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
print(json.dumps([_native.features, said, str(grain.MapDataset.range(3).describe())]))
"""


@pytest.fixture(scope="module")
def without_features(tmp_path_factory):
    """A copy of the package, with the module as `make demo` compiles it."""
    options = ["--profile", "demo", "--no-default-features", "--features", "abi3"]
    build = ["cargo", "build", "--locked", "--quiet", "-p", "grainmill-py", "--lib", *options]
    subprocess.run([*build, "--message-format=short"], cwd=ROOT, check=True)
    place = tmp_path_factory.mktemp("package")
    left_out = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(PACKAGE, place / "grainmill", ignore=left_out)
    module = ROOT / "target/demo/libgrainmill_native.so"
    shutil.copy(module, place / "grainmill/_native.abi3.so")
    return place


def test_all_features_are_compiled_by_default():
    assert _native.features == sorted(TRIED)


@pytest.mark.long  # it compiles the engine; `make clippy` compiles the same sources
@pytest.mark.timeout(1200)
def test_missing_feature_is_named_with_the_command_that_adds_it(without_features, tmp_path):
    texts = [text for texts in TRIED.values() for text in texts]
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(texts)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(without_features)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    features, said, description = json.loads(found.stdout)
    assert features == []
    assert "Engine: profile `demo`, slower than that of a wheel, without buckets" in description
    expected = [feature for feature, texts in TRIED.items() for _ in texts]
    for text, feature, message in zip(texts, expected, said, strict=True):
        assert f"without the feature `{feature}`" in message, text
        assert "`make develop`" in message, text
        assert message.startswith("GrainmillError: "), text
        assert "secret" not in message
