"""Compares grainmill with Grain, other libraries and plain Python on the same work, in one run.

The work, the data sets and the adapters of the libraries are those of a separate benchmark suite,
and of other programs in this folder; this program maps their cases to targets, runs them in rounds,
and writes a dated table to `benches/record`. It compares CPU time (user and system, all threads)
per unit, as the median of rounds: on a shared machine it varies less than wall time.

    python benches/compare.py --suite ../shared/bench --runs 3
    python benches/compare.py --quick       # small data, one round: checks that it runs
    python benches/compare.py --report      # prints the table of the last record
    python benches/compare.py --before PY   # alternates with an earlier version, in interpreter PY
"""

import argparse
import dataclasses
import datetime
import importlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import release_only  # noqa: F401

from grainmill import _native
from grainmill._native import Permutation

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benches/record"
SUITE_FILES = ("bench.py", "cases.py", "peers/__init__.py")


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: a case of the suite, and its targets."""

    name: str
    case: str
    must: float
    aim: float
    grain_best: float
    """The cost of Grain's best variant on the idle machine used to set the targets."""
    default: str
    """The variant with default options, for Grain and grainmill."""
    others: tuple[str, ...] = ()
    """More variants for Grain and grainmill; the best of all is shown beside the default."""
    peers: tuple[str, ...] = ()
    """Variants of other libraries, as `peer/variant`, used if installed."""
    net_of: str | None = None
    """A variant whose cost is subtracted, such as that of the input alone."""
    bare: float | None = None
    """The cost of a plain Python loop on that machine."""
    of_others: bool = False
    """Whether the targets are shares of the cost of the best other library."""


READ = ("dataset_t0", "dataset_t2", "dataset_t0_batch256")
READ_PEERS = (
    "array_record/reader_read_list_1024",
    "array_record/reader_read_list_16384",
    "spdl/chunk256_threads2",
    "torch/dataloader_b256_w0",
    # These shuffle within a buffer or a shard only.
    "tf.data/shuffle16k_batch256",
    "mosaic/iterate",
    "litdata/iterate",
    "webdataset/shuffle10k",
    "hf_datasets/getitems_1024",
)
BATCH_PEERS = (
    "spdl/threads1",
    "spdl/threads2",
    "torch/w0_getitems",
    "tf.data/shuffle1k",
    "mosaic/w0",
    "litdata/w0",
    "webdataset/w0",
    "hf_datasets/torch_w0",
)
TEXT_PEERS = ("spdl/threads2", "torch/w0")
LOOP_PEERS = ("tf.data/graph_map", "torch/w0")
TEXT = ("t0", "t2")
LOOP = ("t0", "batch_then_iter_t0")
BATCH = ("t0_w0", "t2_w0", "batch_then_iter_t0_w0", "batch_then_iter_t2_w0")
ROWS = (
    Row("1 KiB record, shuffled", "read_random.1k", 2.5, 1.5, 91, "dataset_t16", READ, READ_PEERS),
    Row("the same, zstd", "read_random.1kz", 6, 4.5, 91, "dataset_t16", READ, READ_PEERS),
    Row("100 KiB record", "read_random.100k", 42, 33, 67, "dataset_t16", READ, READ_PEERS),
    Row("150 KB image, batch 128", "shuffle_batch.img", 40, 30, 124, "t16_w0", BATCH, BATCH_PEERS),
    Row("8 KB token row, batch 256", "shuffle_batch.tok", 7, 4, 52, "t16_w0", BATCH, BATCH_PEERS),
    Row("packed text row, tokenizer", "text_pipeline.tok", 300, 270, 764, "t16", TEXT, TEXT_PEERS,
        bare=269),
    Row("packed text row, pure Python", "text_pipeline.py", 150, 125, 543, "t16", TEXT, TEXT_PEERS,
        bare=126),
    Row("element, no map", "overhead.k0", 0.10, 0.04, 7.7, "t16", LOOP, LOOP_PEERS,
        bare=0.12),
    Row("element, 1 map", "overhead.k1", 0.15, 0.08, 10, "t16", LOOP, LOOP_PEERS,
        bare=0.15),
    Row("element, 10 maps", "overhead.k10", 0.40, 0.32, 19, "t16", LOOP, LOOP_PEERS,
        bare=0.36),
    Row("token, first-fit 30 bins, net", "packing.2048", 0.02, 0.008, 0.17, "first_fit_30",
        net_of="source_only"),
    Row("token, first-fit 1000 bins, net", "packing.2048", 0.02, 0.008, 0.17, "first_fit_1000",
        net_of="source_only"),
    Row("permuted index", "index_shuffle.1e7", 0.034, 0.02, 3.2, "index_shuffle_loop"),
    Row("TFRecord to ArrayRecord, zstd", "convert.zstd", 9, 7.5, 0.0, "convert"),
    Row("the same, uncompressed", "convert.uncompressed", 2, 1.5, 0.0, "convert"),
    Row("TFRecord scan, 1,000 bytes, wall time", "scan.tfrecord", 0.5, 0.5, 0.0, "scan"),
    Row("Parquet row of 1 KiB, shuffled, warm", "parquet.shuffled", 8, 4, 0.0, "shuffled"),
    Row("the same, locality", "parquet.locality", 1, 0.6, 0.0, "window"),
    Row("100 KiB from S3 on loopback, wall time", "bucket.s3", 1 / 0.7, 1 / 0.9, 0.0,
        "in_flight_32", of_others=True),
    Row("ParseExample, 4 features, 512 int64", "parse.example", 3, 1.5, 0.0, "elements"),
    Row("JPEG 500x375, 224x224 of it", "image.jpeg", 0.9, 0.6, 0.0, "crop", of_others=True),
    Row("JSON of 1 KiB, 3 of 10 fields", "parse.json", 0.5, 0.3, 0.0, "elements", of_others=True),
)  # fmt: skip
# Cases that other programs here measure: the program with its option for the number of rounds, and
# what it takes for small data.
PROGRAMS = {
    "scan": ("record_formats.py --rounds", "--megabytes 20"),
    "parquet": ("parquet.py --runs", "--rows 20000"),
    "bucket": ("buckets.py --runs", "--records 200 --reads 500"),
    "parse": ("parsing.py --rounds", ""),
    "image": ("images.py --rounds", "--repeats 1"),
}
# Measured here: the options of the ArrayRecord files that 1 KiB records are converted to.
CONVERSIONS = {"convert.zstd": "group_size:1", "convert.uncompressed": "group_size:1,uncompressed"}
BARE = {
    "shuffle_batch": "getitems_stack",
    "text_pipeline": "loop",
    "overhead": "loop",
    "index_shuffle": "numpy_permutation",
    "convert": "loop",
    "parse": "loop",
}


# --- running -----------------------------------------------------------------------------------


def suite_folder(given: str | None) -> Path:
    """The benchmark suite's folder: the option, the environment, or next to the repository."""
    folder = Path(given or os.environ.get("GRAINMILL_BENCH_SUITE") or ROOT.parent / "shared/bench")
    missing = [name for name in SUITE_FILES if not (folder / name).is_file()]
    if missing:
        sys.exit(
            f"{folder}: not a benchmark suite ({missing[0]} is missing); pass its folder with "
            "--suite or GRAINMILL_BENCH_SUITE. The engine's benches need none: cargo bench"
        )
    return folder.resolve()


def run_suite(suite: Path, options: argparse.Namespace, python: str = sys.executable) -> dict:
    """Runs the rows' cases and returns the suite's results."""
    variants = {name for row in ROWS for name in (row.default, *row.others, row.net_of) if name}
    variants |= {peer.split("/")[1] for row in ROWS for peer in row.peers} | set(BARE.values())
    cases = dict.fromkeys(row.case for row in ROWS if row.case.startswith(options.cases))
    cases = [case for case in cases if case not in CONVERSIONS and kind(case) not in PROGRAMS]
    if not cases:
        return {"results": {}, "meta": {"versions": {}}}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [python, "bench.py", "--rank", "cpu", "--json", str(out)]
        command += ["--peers", options.peers, "--cases", ",".join(cases)]
        command += ["--variants", ",".join(sorted(variants)), "--runs", str(options.runs)]
        command += ["--scale", str(options.scale), "--cache", options.cache, "--verbose"]
        command += ["--seconds", str(options.seconds)]
        subprocess.run(command, cwd=suite, check=True)
        return json.loads(out.read_text("utf-8"))


def beside_before(suite: Path, options: argparse.Namespace) -> str:
    """A table of the cost of each variant in an earlier version and now, run alternately."""
    options.peers, rounds, options.runs = "grainmill", options.runs, 1
    costs: dict[str, dict[tuple[str, str], list[float]]] = {"before": {}, "now": {}}
    for _ in range(rounds):
        for version, python in (("before", options.before), ("now", sys.executable)):
            for case, by_variant in costs_of(run_suite(suite, options, python)).items():
                for who, found in by_variant.items():
                    costs[version].setdefault((case, who), []).append(found["med"])
    lines = [
        f"CPU microseconds per unit of grainmill, {rounds} alternating rounds, scale "
        f"{options.scale:g}, {os.cpu_count()} CPUs, commit {commit()}; before: the version of the "
        "interpreter given by --before.",
        "",
        "| case | variant | before, median | now, median | now / before | minima, now / before |",
        "| --- " * 6 + "|",
    ]
    for row in ROWS:
        for variant in dict.fromkeys([row.default, *row.others]):
            key = (row.case, f"grainmill/{variant}")
            before, now = (costs[version].get(key) for version in ("before", "now"))
            if before and now:
                median, earlier = statistics.median(now), statistics.median(before)
                lines.append(
                    f"| {row.name} | {variant} | {earlier:.3g} | {median:.3g} "
                    f"| {median / earlier:.2f} "
                    f"| {min(now) / min(before):.2f} |"
                )
    return "\n".join(lines) + "\n"


def permuted_index_us(num_runs: int) -> dict[str, float]:
    """CPU microseconds per index of an epoch of 10^7 records, computed in blocks."""
    num_records, block_len = 10_000_000, 1024
    check = Permutation(1000, 42)
    blocks = [check.block(start, 100) for start in range(0, 1000, 100)]
    assert sorted(np.concatenate(blocks)) == list(range(1000)), "not a permutation"
    costs = []
    for _ in range(num_runs):
        before = cpu_s()
        permutation = Permutation(num_records, 42)
        for start in range(0, num_records, block_len):
            permutation.block(start, min(block_len, num_records - start))
        costs.append((cpu_s() - before) / num_records * 1e6)
    return {"med": statistics.median(costs), "min": min(costs), "max": max(costs)}


def conversion_us(suite: Path, options: argparse.Namespace, case: str) -> dict[str, dict]:
    """CPU microseconds per record: the engine, what compression alone takes, and Python loops."""
    sys.path.insert(0, str(suite))
    records = list(importlib.import_module("data").cached_records(
        options.cache, "text1k", options.scale
    )[1])  # fmt: skip
    num_records, writer_options = len(records), CONVERSIONS[case]
    costs: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=options.cache) as folder:
        source, target = f"{folder}/in.tfrecord", f"{folder}/out"
        frames = _native.RecordOutput(source, "tfrecord")
        frames.copy_list(records)
        frames.close()

        def convert(target_format: str, target_options: str, num_threads: int) -> None:
            output = _native.RecordOutput(target, target_format, target_options)
            stream = _native.RecordStream(source, "tfrecord")
            assert output.copy_stream(stream, num_records, num_threads) == num_records
            output.close()

        def loop() -> None:
            stream = _native.RecordStream(source, "tfrecord")
            with _native.ArrayRecordWriter(target, writer_options) as writer:
                while block := stream.read(256):
                    for record in block:
                        writer.write(record)

        runs = {
            "grainmill/convert": lambda: convert("array_record", writer_options, 1),
            "grainmill/convert_2_threads": lambda: convert("array_record", writer_options, 2),
            # A file of compressed records and nothing else.
            "plain/codec": lambda: convert(
                "bagz", "uncompressed" if "uncompressed" in writer_options else "zstd:3", 1
            ),
            "plain/loop": loop,
        }
        for _ in range(options.runs):
            for who, run in runs.items():
                before = cpu_s()
                run()
                costs.setdefault(who, []).append((cpu_s() - before) / num_records * 1e6)
    return {
        who: {"med": statistics.median(found), "min": min(found), "max": max(found)}
        for who, found in costs.items()
    }


def run_program(name: str, options: argparse.Namespace) -> tuple[dict, str | None]:
    """The costs that a program of `PROGRAMS` measures, and what is missing for more."""
    program, small = PROGRAMS[name]
    file, *arguments = f"{program} {options.runs} --json {small if options.quick else ''}".split()
    command = [sys.executable, str(ROOT / "benches" / file), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return {}, last[0]
    found = json.loads(done.stdout.splitlines()[-1])
    costs = {
        case: {
            who: {"med": statistics.median(times), "min": min(times), "max": max(times)}
            for who, times in by_who.items()
        }
        for case, by_who in found["costs"].items()
    }
    missing = ", ".join(found["missing"])
    return costs, f"not installed: {missing}" if missing else None


def kind(case: str) -> str:
    """What a case measures, without its size or variant."""
    return case.split(".", maxsplit=1)[0]


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def costs_of(results: dict) -> dict[str, dict[str, dict[str, float]]]:
    """Case -> `peer/variant` -> CPU microseconds per unit (median, minimum, maximum)."""
    return {
        case: {
            who: {"runs": found["runs"], **found["cpu_s_per_m"]}
            for who, found in by_variant.items()
            if "cpu_s_per_m" in found
        }
        for case, by_variant in results["results"].items()
    }


def errors_of(results: dict) -> dict[str, str]:
    return {
        f"{case} {who}": found["errors"][-1].strip().splitlines()[-1]
        for case, by_variant in results["results"].items()
        for who, found in by_variant.items()
        if found["errors"]
    }


# --- showing -----------------------------------------------------------------------------------


def cost(costs: dict, case: str, who: str, net_of: str | None = None) -> float | None:
    by_variant = costs.get(case, {})
    if who not in by_variant:
        return None
    subtracted = by_variant.get(f"{who.split('/', maxsplit=1)[0]}/{net_of}", {}).get("med", 0.0)
    return by_variant[who]["med"] - (subtracted if net_of else 0.0)


def minimum(values: list[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def others_of(row: Row, costs: dict) -> dict[str, float]:
    """The cost of each other library's best variant, cheapest first."""
    best: dict[str, float] = {}
    for who, found in costs.get(row.case, {}).items():
        peer = who.split("/")[0]
        if peer not in {"grainmill", "grain", "plain"}:
            best[peer] = min(found["med"], best.get(peer, found["med"]))
    return dict(sorted(best.items(), key=lambda item: item[1]))


def figures_of(row: Row, costs: dict) -> list[float | None]:
    """Costs of grainmill (default, best), Grain (same), the best other library, plain Python."""

    def of(who: str, net_of: str | None = row.net_of) -> float | None:
        return cost(costs, row.case, who, net_of)

    pairs = [
        (
            of(f"{peer}/{row.default}"),
            minimum([of(f"{peer}/{v}") for v in (row.default, *row.others)]),
        )
        for peer in ("grainmill", "grain")
    ]
    if kind(row.case) == "index_shuffle":
        blocks = of("grainmill/blocks")
        pairs[0] = (blocks, blocks)
    others = list(others_of(row, costs).values())
    bare = of(f"plain/{BARE[kind(row.case)]}", None) if kind(row.case) in BARE else None
    return [*pairs[0], *pairs[1], minimum(others), bare]


def slowdown(costs: dict) -> float:
    """The cost of Grain's best variants in this run relative to the idle machine."""
    found = [(figures_of(row, costs)[3], row.grain_best) for row in ROWS if row.case in costs]
    return statistics.median([cost / usual for cost, usual in found if cost is not None] or [1.0])


def table(record: dict) -> str:
    """The record as Markdown: one line per case, targets beside the figures."""
    slower = slowdown(record["costs"])
    lines = [
        f"CPU microseconds per unit, {record['date']}, {record['machine']['cpu']}, "
        f"{record['machine']['cpus']} CPUs, {record['runs']} runs, scale {record['scale']:g}.",
        "",
        f"`{record['command']}`, commit {record['commit']}; "
        + ", ".join(f"{name} {version}" for name, version in sorted(record["versions"].items())),
        "",
        f"Grain's best variants cost {slower:.2f} times as much as on the idle machine used to set "
        "the targets (median of the cases). The last column is the cost of grainmill's default "
        "relative to the required cost: unscaled / scaled by Grain's best in this run / scaled by "
        "the plain Python loop in this run; where the target is a share of the best other library, "
        "relative to that share. Values up to 1 meet the requirement.",
        "",
        "| case | grainmill, default | grainmill, best | Grain, default | Grain, best "
        "| best other library | plain Python | required | aim | relative to required |",
        "| --- " * 10 + "|",
    ]
    for row in ROWS:
        if row.case not in record["costs"]:
            continue
        figures = figures_of(row, record["costs"])
        shown = ["" if value is None else f"{value:.3g}" for value in figures]
        scales = [(1.0, 1.0), (figures[3], row.grain_best), (figures[5], row.bare)]
        if row.of_others:
            scales[0] = (figures[4], 1.0)
        relative = " / ".join(
            "-" if None in {figures[0], now, then} else f"{figures[0] / row.must * then / now:.2f}"
            for now, then in scales
        )
        targets = [
            f"{target:.3g} of the other" if row.of_others else f"{target:g}"
            for target in (row.must, row.aim)
        ]
        lines.append("| " + " | ".join([row.name, *shown, *targets, relative]) + " |")
    others = {row.name: others_of(row, record["costs"]) for row in ROWS}
    if any(others.values()):
        lines += ["", "Other libraries, the best variant of each without worker processes:", ""]
        lines += [
            f"- {name}: " + ", ".join(f"{peer} {value:.3g}" for peer, value in found.items())
            for name, found in others.items()
            if found
        ]
    lines += [f"\nnot measured: {who}: {error}" for who, error in sorted(record["errors"].items())]
    return "\n".join(lines) + "\n"


def machine() -> dict[str, str | int | None]:
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        cpu = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "cpu": cpu,
        "cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def last_record() -> Path:
    records = sorted(RECORD.glob("*-compare.json"))
    if not records:
        sys.exit(f"{RECORD}: no record of this program yet")
    return records[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", help="folder of the benchmark suite")
    parser.add_argument("--peers", default="all", help="libraries; those not installed are skipped")
    names = "only cases whose name starts with one of these, separated by commas"
    parser.add_argument(
        "--cases", type=lambda text: tuple(text.split(",")), default=("",), help=names
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=0, help="per variant; 0: default of the case"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="size of the data sets")
    parser.add_argument("--cache", default=str(Path(tempfile.gettempdir()) / "loader-bench"))
    parser.add_argument("--record", type=Path, default=RECORD, help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="small data, one short round")
    parser.add_argument("--report", action="store_true", help="print the last record and exit")
    parser.add_argument("--before", help="an interpreter with an earlier grainmill")
    options = parser.parse_args()
    if options.report:
        print(table(json.loads(last_record().read_text("utf-8"))))
        return
    if options.quick:
        options.runs, options.seconds, options.scale = 1, 0.3, 0.05
        options.cache += "-quick"
    suite = suite_folder(options.suite)
    options.record.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(tz=datetime.UTC)
    if options.before:
        shown = beside_before(suite, options)
        (options.record / f"{now:%Y-%m-%d-%H%M}-before.md").write_text(shown, "utf-8")
        print(shown)
        return
    results = run_suite(suite, options)
    costs = costs_of(results)
    if "index_shuffle.1e7" in costs:
        costs["index_shuffle.1e7"]["grainmill/blocks"] = permuted_index_us(options.runs)
    for case in CONVERSIONS:
        if case.startswith(options.cases):
            costs[case] = conversion_us(suite, options, case)
    errors = errors_of(results)
    for name in PROGRAMS:
        if any(kind(row.case) == name and row.case.startswith(options.cases) for row in ROWS):
            found, problem = run_program(name, options)
            costs.update(found)
            if problem is not None:
                errors[name] = problem
    record = {
        "date": f"{now:%Y-%m-%d %H:%M}",
        "command": " ".join(["python benches/compare.py", *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine(),
        "versions": results["meta"]["versions"],
        "runs": options.runs,
        "scale": options.scale,
        "costs": costs,
        "errors": errors,
    }
    name = f"{now:%Y-%m-%d-%H%M}-compare"
    (options.record / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    (options.record / f"{name}.md").write_text(table(record), "utf-8")
    print(table(record))


if __name__ == "__main__":
    main()
