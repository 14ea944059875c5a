"""Time and memory of opening files with very many chunks, and of random reads in them.

    python benches/many_chunks.py --chunks 10000000              # in one file
    python benches/many_chunks.py --chunks 1000 --files 100000   # in each of many

Every chunk has one record of a few bytes, so that the index is as large as the data. The files are
written first, in a directory that is removed at the end; many files are links to one.
"""

import argparse
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

from grainmill import _native
from grainmill.sources import ArrayRecordDataSource

_BLOCK = 1 << 16
_MAX_LINKS = 10_000  # of a file; systems have a limit


def record(number):
    return b"%d" % number


def write(path, num_chunks):
    """A file with `num_chunks` chunks of one record."""
    output = _native.RecordOutput(str(path), "array_record", "group_size:1,uncompressed")
    for start in range(0, num_chunks, _BLOCK):
        stop = min(num_chunks, start + _BLOCK)
        output.copy_list([record(number) for number in range(start, stop)])
    output.close()


def memory_mb():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, peak


def measure(paths, num_chunks, num_reads):
    """What opening, the first reads and later ones take; each read is compared."""
    draw = random.Random(0)
    total = num_chunks * len(paths)
    before_mb, _ = memory_mb()

    def step(name, work):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        work()
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        now_mb, peak_mb = memory_mb()
        print(
            f"{name:24} {wall_s:9.3f} s, CPU {cpu_s:9.3f} s; {now_mb - before_mb:8.1f} MB more, "
            f"peak {peak_mb:8.1f} MB",
            flush=True,
        )

    source = None

    def opened():
        nonlocal source
        source = ArrayRecordDataSource(paths)
        assert len(source) == total

    def reads():
        for _ in range(num_reads):
            number = draw.randrange(total)
            assert source[number] == record(number % num_chunks)

    step("open", opened)
    step(f"{num_reads} reads, first", reads)
    step(f"{num_reads} reads, again", reads)
    step(f"{num_reads} reads, again", reads)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chunks", type=int, default=10**6, help="of each file")
    parser.add_argument("--files", type=int, default=1)
    parser.add_argument("--reads", type=int, default=1000)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / "00000000.array_record"
        began = time.perf_counter()
        write(first, options.chunks)
        print(
            f"{options.chunks} chunks, {first.stat().st_size / 2**20:.0f} MiB, written in "
            f"{time.perf_counter() - began:.1f} s; {options.files} files",
            flush=True,
        )
        paths = [first]
        for number in range(1, options.files):
            paths.append(Path(folder) / f"{number:08}.array_record")
            if number % _MAX_LINKS:
                os.link(paths[number - number % _MAX_LINKS], paths[-1])
            else:
                shutil.copyfile(first, paths[-1])
        # In a process whose peak is its own.
        child = os.fork()
        if not child:
            measure([str(path) for path in paths], options.chunks, options.reads)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
