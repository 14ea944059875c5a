"""The requests of a process at a server are never more at a time than its limits say."""

import asyncio
import os
import subprocess
import sys

import pytest
from bucket_server import BucketServer
from waits import becomes

import grainmill as grain
from grainmill import files
from grainmill.array_record import ArrayRecordWriter

NUM_FILES = 300
NUM_PIPELINES = 8
OF_PROCESS = 256
PROGRAM = """
import sys, threading
import grainmill as grain
from grainmill import files, sources

failures = []

def read(seed):
    try:
        paths = sources.expand_paths(sys.argv[1])
        data = grain.MapDataset.source(sources.ArrayRecordDataSource(paths))
        batches = data.shuffle(seed)[:200].map(len).batch(100).to_iter_dataset()
        assert sum(int(batch.sum()) for batch in batches) == min(len(data), 200) * 20_000
    except BaseException as error:
        failures.append(error)

threads = [threading.Thread(target=read, args=[seed]) for seed in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failures, failures
found = files.convert(sys.argv[1], "out.tfrecord")
assert found["records"] == 4 * len(sources.expand_paths(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    """A file whose records are read one by one."""
    path = tmp_path_factory.mktemp("data") / "file"
    with ArrayRecordWriter(str(path), "group_size:1,uncompressed") as writer:
        for number in range(4):
            writer.write(bytes([number]) * 20_000)
    return path.read_bytes()


def environment(server, **variables):
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret-key"}
    reached = {"AWS_ENDPOINT": server.url, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    return {**os.environ, **keys, **reached, **variables}


@pytest.mark.parametrize("limit", [None, 12])
def test_requests_of_eight_pipelines_are_within_the_limits(content, tmp_path, limit):
    """Hundreds of files are listed, opened and read, and then converted."""
    with BucketServer(latency_s=0.05) as server:
        for number in range(NUM_FILES if limit is None else NUM_FILES // 10):
            server.put(f"/bucket/data/{number:05}.array_record", content)
        numbers = {} if limit is None else {"GRAINMILL_BUCKET_MAX_IN_FLIGHT": str(limit)}
        subprocess.run(
            [sys.executable, "-c", PROGRAM, "s3://bucket/data/"],
            env=environment(server, **numbers),
            check=True,
            cwd=tmp_path,
            timeout=300,
        )
        # The thread of a pipeline that lists, or opens files, does not wait for others.
        most = OF_PROCESS if limit is None else limit + NUM_PIPELINES
        assert most // 2 <= server.max_active <= most


def test_a_storage_that_does_not_answer_keeps_no_other_from_being_read(content):
    """More reads wait for one bucket than a process may have, and those of the other go on."""
    program = """
import os, threading
import grainmill as grain
from grainmill import sources

def pipeline(url, seed):
    paths = [f"{url}{number:05}.array_record" for number in range(100)]
    data = grain.MapDataset.source(sources.ArrayRecordDataSource(paths))
    return iter(data.shuffle(seed).repeat().map(len).batch(20).to_iter_dataset())

silent = [pipeline("s3://silent/", seed) for seed in range(3)]
print("open", flush=True)
input()
for each in silent:
    threading.Thread(target=next, args=[each], daemon=True).start()
input()
other = pipeline("s3://other/", 0)
for _ in range(10):
    next(other)
print("done", flush=True)
os._exit(0)
"""
    with BucketServer() as server:
        for bucket in ("silent", "other"):
            for number in range(100):
                server.put(f"/{bucket}/{number:05}.array_record", content)
        answer, num_silent = server._answer, []

        async def answered(request, body, fault, writer):
            if is_silent and request.path.startswith("/silent/"):
                num_silent.append(request)
                await never.wait()
            return await answer(request, body, fault, writer)

        is_silent, never = False, asyncio.Event()
        server._answer = answered
        with subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment(server),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                assert process.stdout.readline() == "open\n"
                is_silent = True
                print(file=process.stdin, flush=True)
                assert becomes(lambda: len(num_silent) >= OF_PROCESS - 32)
                print(file=process.stdin, flush=True)
                assert process.stdout.readline() == "done\n"
            finally:
                process.kill()


def test_shuffled_lines_of_small_far_files_are_requested_together(tmp_path, monkeypatch):
    """Neighbours among the records that are converted next are one request."""
    lines = [[b'{"x": "%d %03000d"}' % (file, row) for row in range(200)] for file in range(10)]
    monkeypatch.setenv("GRAINMILL_CACHE_DIR", str(tmp_path))
    with BucketServer(latency_s=0.02) as server:
        for file, each in enumerate(lines):
            server.put(f"/{file}.jsonl", b"\n".join(each))
        urls = [f"{server.url}/{file}.jsonl" for file in range(10)]
        files.convert(urls, tmp_path / "out.jsonl", shuffle=True, seed=3)
        assert len(server.requests) < 20 * 10  # opening and scanning them included
    everything = grain.MapDataset.source([line for each in lines for line in each])
    found = (tmp_path / "out.jsonl").read_bytes().splitlines()
    assert found == list(everything.shuffle(seed=3))
