"""Calls that wait for a silent server, each interrupted as by Ctrl-C; prints what it raised.

Arguments: a directory with the files `r.array_record`, `r.jsonl`, `r.tfrecord`, `r.bag`,
`r.parquet` and `r.tar`, and the names of the calls. With `REPORTED` in the environment, calls are
interrupted once their wait is reported, and what the report says of storage is printed, too.
"""

import contextlib
import http.server
import logging
import os
import pathlib
import pickle
import select
import signal
import sys
import threading
import time

folder = pathlib.Path(sys.argv[1])
os.environ |= {
    "GRAINMILL_CACHE_DIR": str(folder / "caches"),
    "GRAINMILL_BUCKET_DEADLINE_S": "600",
    "GRAINMILL_BUCKET_STALL_S": "600",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret-key",
    "AWS_REGION": "us-east-1",
}

import grainmill as grain  # noqa: E402 - it sees the environment
from grainmill import array_record  # noqa: E402
from grainmill._tools.main import main  # noqa: E402

silent, asked = threading.Event(), threading.Event()
delay_s = [0.0]  # of every answer


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # the body would wait for the client to acknowledge the head

    def log_message(self, *_):
        pass

    def do_GET(self):
        if silent.is_set():
            asked.set()
            select.select([self.connection], [], [], 3600)  # until the client closes it
            self.close_connection = True
            return None
        time.sleep(delay_s[0])
        path = folder / self.path.rpartition("/")[2]
        if not path.is_file():
            self.send_response(404)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        data = path.read_bytes()
        first, last = self.headers["Range"].partition("=")[2].split("-")
        begin = int(first) if first else max(0, len(data) - int(last))
        end = min(len(data), int(last) + 1) if first else len(data)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.send_header("ETag", '"tag"')
        self.send_header("Last-Modified", "Tue, 01 Jan 2030 00:00:00 GMT")
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        return self.wfile.write(data[begin:end])

    do_PUT = do_POST = do_HEAD = do_GET  # noqa: N815 - the names of `http.server`


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128  # others are asked again after a second


server = Server(("127.0.0.1", 0), Handler)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
address = f"127.0.0.1:{server.server_port}"
os.environ["AWS_ENDPOINT_URL"] = f"http://{address}"
url, bucket = f"http://{address}/r", "s3://bucket/r"
EAGER = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


def opened(make):
    """What `make` returns while the server answers."""
    silent.clear()
    made = make()
    asked.clear()
    silent.set()
    return made


def source(suffix=".array_record", name="ArrayRecordDataSource"):
    return opened(lambda: getattr(grain.sources, name)(url + suffix))


def iterate(options, wrap=lambda ds: ds):
    found = source()
    ds = grain.MapDataset.source(found).shuffle(seed=1).to_iter_dataset(options)
    next(iter(wrap(ds)))


def iterate_copy(made):
    """Opens the files again, while the iterator is made."""
    next(iter(grain.MapDataset.source(pickle.loads(pickle.dumps(made))).to_iter_dataset(EAGER)))


def resume(options):
    """Goes on after the interruption, with what would have come without it."""
    ds = grain.MapDataset.source(source()).shuffle(seed=1).to_iter_dataset(options)
    silent.clear()
    expected = list(ds)
    iterator = iter(ds)
    found = [next(iterator) for _ in range(5)]
    asked.clear()
    silent.set()
    try:
        while True:
            found.append(next(iterator))
    finally:
        silent.clear()
        assert found + list(iterator) == expected


def read_on(options, wrap=lambda ds: ds, wait_s=0.0):
    """Reads after the server fell silent; of functions that wait, workers have threads."""
    ds = grain.MapDataset.source(source()).map(lambda x: time.sleep(wait_s) or x)
    silent.clear()
    iterator = iter(wrap(ds.repeat().shuffle(seed=1).to_iter_dataset(options)))
    for _ in range(100):
        next(iterator)
    asked.clear()
    silent.set()
    for _ in iterator:
        pass


def write_part():
    with array_record.ArrayRecordWriter("s3://bucket/new", "group_size:1,uncompressed") as writer:
        for _ in range(10):
            writer.write(bytes(1 << 20))


def command(*arguments):
    code = main(list(arguments))
    if code == 130:
        raise KeyboardInterrupt
    raise AssertionError(code)


SOURCES = {
    ".array_record": "ArrayRecordDataSource",
    ".jsonl": "JsonLinesDataSource",
    ".tfrecord": "TFRecordDataSource",
    ".bag": "BagzDataSource",
    ".parquet": "ParquetDataSource",
    ".tar": "WebDatasetDataSource",
}
CALLS = {
    **{
        f"open {n}": lambda s=s, n=n: getattr(grain.sources, n)(url + s) for s, n in SOURCES.items()
    },
    **{f"read {n}": lambda s=s, n=n: source(s, n)[3] for s, n in SOURCES.items()},
    "open many": lambda: grain.sources.ArrayRecordDataSource([f"{url}{k}" for k in range(50)]),
    "open many parquet": lambda: grain.sources.ParquetDataSource([f"{url}{k}" for k in range(50)]),
    "getitems": lambda: source().__getitems__(range(0, 200, 3)),
    "getitems of parquet": lambda: source(".parquet", "ParquetDataSource").__getitems__([1, 199]),
    "map dataset": lambda: grain.MapDataset.source(source())[5],
    "list": lambda: grain.sources.expand_paths("s3://bucket/*"),
    "iterate in line": lambda: iterate(EAGER),
    "iterate with threads": lambda: iterate(grain.ReadOptions()),
    "iterate with workers": lambda: iterate(grain.ReadOptions(num_workers=1)),
    "workers that read": lambda: read_on(grain.ReadOptions(num_workers=1)),
    "workers that read on threads": lambda: read_on(
        grain.ReadOptions(num_workers=2, num_threads=4), wait_s=0.002
    ),
    "mp prefetch that reads": lambda: read_on(
        grain.ReadOptions(prefetch_buffer_size=4),
        lambda ds: ds.mp_prefetch(grain.MultiprocessingOptions(num_workers=1)),
    ),
    "iterate a copy": lambda: iterate_copy(source()),
    "iterate a copy of parquet": lambda: iterate_copy(source(".parquet", "ParquetDataSource")),
    "batches": lambda: iterate(EAGER, lambda ds: ds.batch(4, batch_fn=list)),
    "thread prefetch": lambda: iterate(
        EAGER,
        lambda ds: grain.experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=2),
    ),
    "mp prefetch": lambda: iterate(
        EAGER, lambda ds: ds.mp_prefetch(grain.MultiprocessingOptions(num_workers=1))
    ),
    "resume in line": lambda: resume(EAGER),
    "resume with threads": lambda: resume(grain.ReadOptions(prefetch_buffer_size=4)),
    "tfrecord stream": lambda: next(
        iter(grain.experimental.TFRecordIterDataset(f"{url}.tfrecord"))
    ),
    "parquet stream": lambda: next(iter(grain.experimental.ParquetIterDataset(f"{url}.parquet"))),
    "array record reader": lambda: array_record.ArrayRecordReader(f"{url}.array_record"),
    "write": write_part,
    "cache on disk": lambda: grain.MapDataset.source(source()).cache(str(folder / "c"))[0],
    "info": lambda: command("info", f"{url}.array_record"),
    "verify": lambda: command("verify", f"{url}.array_record"),
    "head": lambda: command("head", f"{url}.jsonl"),
    "convert": lambda: command("convert", f"{url}.jsonl", str(folder / "out.array_record")),
    "convert to a bucket": lambda: command(
        "convert", str(folder / "r.jsonl"), "s3://bucket/out.array_record"
    ),
    "open many arrow": lambda: grain.sources.ArrowDataSource([f"{url}{k}" for k in range(50)]),
}


class Reports(logging.Handler):
    """Keeps what is said of storage."""

    def __init__(self):
        super().__init__()
        self.lines, self.has_come = [], threading.Event()

    def emit(self, record):
        lines = [line.strip() for line in record.getMessage().splitlines()]
        self.lines += [line for line in lines if line.startswith("waiting for")]
        self.has_come.set()


reports = Reports()
is_reported = "REPORTED" in os.environ
if is_reported:
    logging.getLogger("grainmill").addHandler(reports)
    grain.config.update("stall_warning_s", 0.1)


def interrupt():
    asked.wait()
    time.sleep(0.05)
    if is_reported:  # after that of a wait of this length
        while not reports.lines:
            reports.has_come.wait(60)
            reports.has_come.clear()
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    for name in sys.argv[2:] or CALLS:
        asked.clear()
        silent.set()
        reports.lines.clear()
        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        began = time.monotonic()
        try:
            CALLS[name]()
            outcome = "nothing"
        except BaseException as error:
            outcome = repr(error)
        said = f", {reports.lines[0]}" if is_reported else ""
        print(f"{name}: {outcome}{said} after {time.monotonic() - began:.1f} s", flush=True)
        with contextlib.suppress(KeyboardInterrupt):  # if the call has ended before
            asked.set()
            thread.join()
    print("end", flush=True)
