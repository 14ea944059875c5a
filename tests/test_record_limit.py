"""Small files that decode to much: each reader and tool refuses them before it takes the memory."""

import gzip
import json
import os
import subprocess
import sys
import tarfile
import zlib

import pytest
from under_test import IS_GRAIN

if IS_GRAIN:
    pytest.skip("about grainmill's own limit", allow_module_level=True)

from grainmill import _native
from grainmill.array_record import ArrayRecordWriter

LIMIT = 64 << 20
LEN = 80 << 20
MORE_MEMORY = 48 << 20


def zstd_of_zeros(byte_len):
    """A frame of blocks that each repeat one byte 128 KiB times: 4 bytes each."""
    num_blocks = byte_len >> 17
    blocks = [
        ((1 << 20) | 2 | (number == num_blocks - 1)).to_bytes(3, "little") + b"\0"
        for number in range(num_blocks)
    ]
    head = b"\x28\xb5\x2f\xfd\xc0\x38" + byte_len.to_bytes(8, "little")
    return head + b"".join(blocks)


def compressed(parts, wbits):
    squeeze = zlib.compressobj(1, wbits=wbits)
    return b"".join([*(squeeze.compress(part) for part in parts), squeeze.flush()])


def zeros():
    return [bytes(1 << 20)] * (LEN >> 20)


def tfrecord(wbits):
    length = LEN.to_bytes(8, "little")
    head = length + _native.masked_crc32c(length).to_bytes(4, "little")
    return compressed([head, *zeros(), bytes(4)], wbits)


def array_record(options):
    def content(path):
        with ArrayRecordWriter(str(path), options) as writer:
            writer.write(bytes(LEN))

    return content


def tar(path):
    header = tarfile.TarInfo("0.bin")
    header.size = LEN
    with gzip.open(path, "wb", 1) as file:
        file.write(header.tobuf())
        for part in zeros():
            file.write(part)
        file.write(bytes(1024))


def bag(path):
    """More than the default limit; the others exceed a lower one, or they take long to make."""
    frame = zstd_of_zeros(1 << 30)
    assert len(frame) < 33 << 10
    path.write_bytes(frame + len(frame).to_bytes(8, "little"))


LINE = compressed([b'{"a":"', *[b"x" * (1 << 20)] * (LEN >> 20), b'"}\n'], 31)
BOMBS = {
    "a.bagz": bag,
    "zstd.array_record": array_record("group_size:1,zstd"),
    "brotli.array_record": array_record("group_size:1,brotli:1"),
    "transposed.array_record": array_record("group_size:1,transpose,zstd"),
    "a.tfrecord.gz": lambda path: path.write_bytes(tfrecord(31)),
    "a.tfrecord.zlib": lambda path: path.write_bytes(tfrecord(15)),
    "a.jsonl.gz": lambda path: path.write_bytes(LINE),
    "a.tar.gz": tar,
}
USES = {
    "read": "source_of(path)[0]",
    "read as a block": "next(iter(MapDataset.source(source_of(path)).batch(1)))",
    "in order": "next(iter(grain.experimental.TFRecordIterDataset(path)))",
    "verify": "main(['verify', path]) and 1 // 0",
    "cat": "main(['cat', path]) and 1 // 0",
    "convert": "main(['convert', path, path + '.array_record']) and 1 // 0",
}
CODE = """
import contextlib, io, json, resource, sys
import grainmill as grain
from grainmill import MapDataset
from grainmill._tools.main import main
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
path = sys.argv[1]
kinds = {"array_record": "ArrayRecord", "bagz": "Bagz", "tfrecord": "TFRecord",
         "jsonl": "JsonLines", "tar": "WebDataset"}
kind = next(kind for name, kind in kinds.items() if name in path.rsplit("/", 1)[-1])
source_of = getattr(grain.sources, kind + "DataSource")
with contextlib.suppress(Exception):
    source_of(path + ".missing")
before, found = peak(), {}
for use, code in json.loads(sys.argv[2]).items():
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            exec(code)
    except Exception as error:
        out.write(str(error))
    found[use] = [peak() - before, out.getvalue()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=BOMBS)
def bomb(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("bombs") / request.param
    BOMBS[request.param](path)
    assert path.stat().st_size < 2 << 20
    return path


def test_no_reader_or_tool_takes_the_memory_that_a_small_file_states(bomb):
    """All of them in one process, whose memory at its peak tells of each."""
    uses = {use: code for use, code in USES.items() if use != "in order" or "tfrecord" in bomb.name}
    limit = {} if bomb.suffix == ".bagz" else {"GRAINMILL_MAX_RECORD_BYTES": str(LIMIT)}
    run = subprocess.run(
        [sys.executable, "-c", CODE, str(bomb), json.dumps(uses)],
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
        env={**os.environ, **limit},
    )
    found = json.loads(run.stdout)
    assert found.keys() == uses.keys()
    for use, (peak, text) in found.items():
        assert peak << 10 < MORE_MEMORY, use
        assert "GRAINMILL_MAX_RECORD_BYTES" in text, use
        assert bomb.name in text, use


def test_what_is_compressed_as_data_is_has_no_limit(tmp_path):
    """The limit is lowered to one byte: records of at most 64 times their stored bytes are read."""
    record = os.urandom(100_000) * 20
    path = tmp_path / "a.array_record"
    with ArrayRecordWriter(str(path), "group_size:1,zstd") as writer:
        writer.write(record)
    code = (
        "import sys, grainmill as grain;"
        "print(len(grain.sources.ArrayRecordDataSource(sys.argv[1])[0]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "GRAINMILL_MAX_RECORD_BYTES": "1"},
    )
    assert run.stdout == f"{len(record)}\n"
