"""Every source of files over a server that takes 20 ms for each request, and counts them.

    python benches/far_sources.py                       # a table of all cases
    python benches/far_sources.py --only bagz,tfrecord  # those whose name has one of these
    python benches/far_sources.py --record              # also writes it to benches/record

For each source, order of records, transform and reader, a fresh process takes elements for a while
from a pipeline over `http://`, after the first one. The table has records per second and the
requests in flight: their mean over that time, and their maximum. The server is one thread of
Python, and answers a few thousand requests a second at most; where records are merged into longer
requests, few are needed.

`open` has the seconds and requests in which a source over 1,000 small files, and over one long
file, is opened, without an index and with that of the first time.
"""

import argparse
import datetime
import gzip
import io
import json
import os
import platform
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import release_only  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from bucket_server import BucketServer
from oracle_example import bytes_list, example, int64_list
from record_formats import bagz, tar

from grainmill._native import masked_crc32c
from grainmill.array_record import ArrayRecordWriter

ROOT = Path(__file__).parents[1]
LATENCY_S = 0.02
NUM_RECORDS = 2000
RECORD_LEN = 16 << 10  # longer ones would be limited by the server, shorter ones are merged
SECONDS = 2.0
BATCH = 32

# name: the class, its arguments, and what its records are.
SOURCES = {
    "ArrayRecord": ("ArrayRecordDataSource", {}, "example"),
    "TFRecord": ("TFRecordDataSource", {}, "example"),
    "TFRecord gzip": ("TFRecordDataSource", {}, "example"),
    "JSON lines": ("JsonLinesDataSource", {}, "json"),
    "JSON lines parsed": ("JsonLinesDataSource", {"parse": True}, "object"),
    "Bagz": ("BagzDataSource", {}, "example"),
    "Bagz zstd": ("BagzDataSource", {"compression": "zstd"}, "example"),
    "Bagz interleaved": ("BagzDataSource", {"layout": "interleaved"}, "example"),
    "WebDataset": ("WebDatasetDataSource", {}, "sample"),
}

CLIENT = '''
import json, sys, time
import numpy as np
import grainmill as grain
from grainmill.transforms import Feature, Map, ParseExample, ParseJson

case = json.loads(sys.stdin.readline())


class Length(Map):
    """A cheap function of an element."""

    def map(self, element):
        return np.int64(len(element))


class Lengths(Length):
    """The same for whole blocks."""

    def map_block(self, elements):
        return np.array([len(element) for element in elements])


def block_transform(kind):
    if kind == "example":
        return ParseExample({"label": "int64", "tokens": Feature("int64", (100,))})
    if kind == "json":
        return ParseJson({"label": "int64"})
    return Lengths()


def main():
    source = getattr(grain.sources, case["class"])(case["urls"], **case["arguments"])
    transforms = {"none": [], "map": [Length()], "block": [block_transform(case["kind"])]}
    operations = transforms[case["transform"]]
    batch = [grain.transforms.Batch(case["batch"])] if case["batch"] else []
    if case["reader"] == "iter":
        ds = grain.MapDataset.source(source)
        ds = ds.shuffle(seed=1).repeat() if case["shuffled"] else ds.repeat()
        for operation in operations:
            ds = ds.map(operation)
        if batch:
            ds = ds.batch(case["batch"])
        made = ds.to_iter_dataset(grain.ReadOptions(num_workers=case["workers"]))
    else:
        made = grain.load(
            source,
            shuffle=case["shuffled"],
            seed=1,
            transformations=[*operations, *batch],
            worker_count=case["workers"],
        )
    iterator = iter(made)
    next(iterator)  # workers have started, and the storage is known to be slow
    print("ready", flush=True)
    sys.stdin.readline()
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < case["seconds"]:
        next(iterator)
        count += case["batch"] or 1
    elapsed = time.perf_counter() - started
    print(json.dumps([count / elapsed, elapsed]), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
'''

OPEN = """
import json, sys, time
import grainmill as grain

case = json.loads(sys.stdin.readline())
started = time.perf_counter()
source = getattr(grain.sources, case["class"])(case["urls"], **case["arguments"])
print(json.dumps([time.perf_counter() - started, len(source)]), flush=True)
"""


def contents():
    """The records of each kind, which hardly compress."""
    random = np.random.default_rng(0)
    rows = list(enumerate(random.integers(0, 50_000, (NUM_RECORDS, 100)).tolist()))
    rests = [random.bytes(RECORD_LEN) for _ in range(NUM_RECORDS)]
    examples = [
        example(label=int64_list([number]), tokens=int64_list(row), rest=bytes_list([rest]))
        for (number, row), rest in zip(rows, rests, strict=True)
    ]
    texts = [random.bytes(RECORD_LEN // 2).hex() for _ in range(NUM_RECORDS)]
    lines = [
        json.dumps({"label": number, "tokens": row, "rest": text}).encode()
        for (number, row), text in zip(rows, texts, strict=True)
    ]
    return examples, lines


def tfrecord(records):
    """A TFRecord file."""
    out = io.BytesIO()
    for record in records:
        length = struct.pack("<Q", len(record))
        out.write(length + struct.pack("<I", masked_crc32c(length)))
        out.write(record + struct.pack("<I", masked_crc32c(record)))
    return out.getvalue()


def files_of(name, examples, lines, folder):  # noqa: PLR0911 - one for each
    """The files of a source, by name."""
    if name == "ArrayRecord":
        path = folder / "file"
        with ArrayRecordWriter(str(path), "group_size:1,uncompressed") as writer:
            for record in examples:
                writer.write(record)
        return {"a.array_record": path.read_bytes()}
    if name.startswith("TFRecord"):
        data = tfrecord(examples)
        gzipped = {"a.tfrecord.gz": gzip.compress(data, 1)}
        return gzipped if name.endswith("gzip") else {"a.tfrecord": data}
    if name.startswith("JSON"):
        return {"a.jsonl": b"\n".join(lines) + b"\n"}
    if name == "WebDataset":
        members = ((f"{k:06}.bin", record) for k, record in enumerate(examples))
        return {"a.tar": tar(members)}
    if name == "Bagz zstd":
        return {"a.bagz": bagz([zstandard_frame(record) for record in examples])}
    if name == "Bagz interleaved":
        return {f"a-{k:05}-of-00004.bag": bagz(examples[k::4]) for k in range(4)}
    return {"a.bag": bagz(examples)}


def zstandard_frame(record):
    """A zstd frame of one block that is not compressed."""
    length = len(record)
    head = struct.pack("<IBI", 0xFD2FB528, 0b10100000, length)  # one segment, length in 4 bytes
    return head + struct.pack("<I", length << 3 | 1)[:3] + record


class Client:
    """A process that runs one of the programs above with a case."""

    def __init__(self, program, case):
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
        environment["GRAINMILL_CACHE_DIR"] = case["cache_dir"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._path = Path(case["cache_dir"]) / "client.py"
        self._path.write_text(program)
        command = [sys.executable, str(self._path)]
        self._process = subprocess.Popen(command, text=True, env=environment, **pipes)
        self.tell(json.dumps(case))

    def tell(self, line=""):
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def line(self):
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the client ended with {self._process.wait()}")
        return line

    def close(self):
        with self._process:
            self._process.kill()


def measured(server, case):
    """Records per second, and the mean and maximum of requests in flight."""
    client = Client(CLIENT, case)
    client.line()
    server.requests.clear()
    server.max_active = 0
    client.tell()
    rate, elapsed = json.loads(client.line())
    mean = len(server.requests) * LATENCY_S / elapsed
    client.close()
    return rate, mean, server.max_active


def cases():
    """The transform, batch size, order and reader of each case."""
    for shuffled in (True, False):
        for transform, batch in (("none", 0), ("map", 0), ("block", BATCH)):
            yield transform, batch, shuffled, "iter", 0
    yield "block", BATCH, True, "iter", 2
    for workers in (0, 2):
        yield "block", BATCH, True, "DataLoader", workers


def opened(server, name, urls, folder):
    """A row of the table of opening: without an index, and with it."""
    cells = []
    cache_dir = folder / f"cache-{name.replace(' ', '-')}"
    cache_dir.mkdir(parents=True)
    kind, arguments, _ = SOURCES[name]
    for _ in range(2):
        server.requests.clear()
        server.max_active = 0
        case = {"class": kind, "urls": urls, "arguments": arguments, "cache_dir": str(cache_dir)}
        client = Client(OPEN, case)
        seconds, count = json.loads(client.line())
        client.close()
        cells.append(f"{seconds:.2f} | {len(server.requests)} | {server.max_active}")
    return f"| {name}, {len(urls)} files, {count} records | {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="parts of names of sources, or `open`")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each case")
    parser.add_argument("--record", action="store_true", help="write the result to benches/record")
    options = parser.parse_args()
    chosen = options.only.lower().split(",")
    lines = []

    def show(line):
        print(line, flush=True)
        lines.append(line)

    def is_chosen(name):
        return any(part in name.lower() for part in chosen)

    show("| source, order, transform, batch, reader | records/s | mean in flight | most |")
    show("| --- | --- | --- | --- |")
    examples, json_lines = contents()
    with tempfile.TemporaryDirectory() as temporary, BucketServer(latency_s=LATENCY_S) as server:
        folder = Path(temporary)
        for name in filter(is_chosen, SOURCES):
            kind, arguments, of = SOURCES[name]
            urls = []
            for file, data in files_of(name, examples, json_lines, folder).items():
                server.put(f"/{name.replace(' ', '-')}/{file}", data)
                urls.append(f"{server.url}/{name.replace(' ', '-')}/{file}")
            for transform, batch, shuffled, reader, workers in cases():
                case = {
                    "class": kind,
                    "arguments": arguments,
                    "urls": urls,
                    "kind": of,
                    "transform": transform,
                    "batch": batch,
                    "shuffled": shuffled,
                    "reader": reader,
                    "workers": workers,
                    "seconds": options.seconds,
                    "cache_dir": str(folder),
                }
                order = "shuffled" if shuffled else "in order"
                title = f"{name}, {order}, {transform}, {batch or 'no batch'}, {reader}"
                title += f" {workers}" if reader != "iter" or workers else ""
                rate, mean, most = measured(server, case)
                show(f"| {title} | {rate:.0f} | {mean:.0f} | {most} |")
        if is_chosen("open"):
            show("")
            show("| opening | s | requests | most | again: s | requests | most |")
            show("| --- | --- | --- | --- | --- | --- | --- |")
            for name in ("TFRecord", "TFRecord gzip", "JSON lines", "Bagz", "WebDataset"):
                (file, data), *_ = files_of(name, examples[:20], json_lines[:20], folder).items()
                urls = []
                for number in range(1000):
                    server.put(f"/many/{number:04}-{file}", data)
                    urls.append(f"{server.url}/many/{number:04}-{file}")
                show(opened(server, name, urls, folder / "many"))
            for name in ("TFRecord", "TFRecord gzip", "JSON lines", "Bagz"):
                ((file, data),) = files_of(name, examples * 4, json_lines * 4, folder).items()
                server.put(f"/long/{file}", data)
                show(opened(server, name, [f"{server.url}/long/{file}"], folder / "long"))
    if options.record:
        now = datetime.datetime.now(datetime.UTC)
        about = (
            f"Python {platform.python_version()}, {os.cpu_count()} cores of "
            f"{platform.processor() or platform.machine()}, load {os.getloadavg()[0]:.1f}; "
            f"{LATENCY_S * 1000:.0f} ms a request. "
            "Command: `python benches/far_sources.py --record`"
        )
        text = "\n".join(["# Sources over slow storage", "", about, "", *lines, ""])
        path = ROOT / "benches/record" / f"{now:%Y-%m-%d-%H%M}-far-sources.md"
        path.write_text(text)


if __name__ == "__main__":
    main()
