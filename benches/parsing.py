"""CPU time of parsing records, beside the loops in Python that it replaces, in one process.

    python benches/parsing.py [--rounds 15] [--json]

Needs `protobuf`; `orjson` is left out if it is not installed. Prints a table for `benches/record`:
microseconds of CPU per record, the median of alternating rounds. Elements are made in blocks of
100 and dropped, as by a pipeline.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import numpy as np
import release_only  # noqa: F401

import grainmill as grain
from grainmill.array_record import ArrayRecordWriter
from grainmill.transforms import Feature, JsonField, ParseExample, ParseJson

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from oracle_example import Example, bytes_list, example, float_list, int64_list

NUM = 500
# A pipeline drops the elements of a block or batch before it makes others.
BLOCK_LEN = 100
# What is read from a file is so many times as much, so that starting a pipeline hardly counts.
REPEATS = 20
# The lines of the table that `compare.py` shows: its case, and who is measured.
COMPARED = {
    "Example, 4 features: protobuf loop": ("parse.example", "plain/loop"),
    "Example, 4 features: ParseExample": ("parse.example", "grainmill/elements"),
    "JSON, 3 of 10 fields: orjson loop": ("parse.json", "orjson/loop"),
    "JSON, 3 of 10 fields: ParseJson": ("parse.json", "grainmill/elements"),
}


def examples():
    """Messages with four features, one of them 512 token ids."""
    rng = np.random.default_rng(0)
    return [
        example(
            id=bytes_list([b"doc%d" % number]),
            label=int64_list([number]),
            tokens=int64_list(rng.integers(0, 50_000, 512).tolist()),
            weight=float_list([number / 2]),
        )
        for number in range(NUM)
    ]


FEATURES = {"id": bytes, "label": "int64", "tokens": Feature("int64", (512,)), "weight": "float32"}


def by_protobuf(records):
    found = []
    for record in records:
        features = Example.FromString(record).features.feature
        found.append(
            {
                "id": features["id"].bytes_list.value[0],
                "label": np.int64(features["label"].int64_list.value[0]),
                "tokens": np.array(features["tokens"].int64_list.value, np.int64),
                "weight": np.float32(features["weight"].float_list.value[0]),
            }
        )
    return found


def texts():
    """JSON objects of ten fields and about 1 KiB."""
    return [
        json.dumps(
            {
                "id": number,
                "text": "word " * 70,
                "url": "https://example.org/" + "a" * 60,
                "title": "t" * 80,
                "lang": "en",
                "score": number * 0.37,
                "tags": ["a", "b", "c"],
                "meta": {"a": 1, "b": [1, 2, 3], "note": "x" * 190},
                "date": "2026-11-23",
                "body": "b" * 150,
            }
        ).encode()
        for number in range(NUM)
    ]


FIELDS = {"text": str, "id": "int64", "score": JsonField("float32")}


def by_orjson(records):
    import orjson  # noqa: PLC0415

    found = []
    for record in records:
        fields = orjson.loads(record)
        found.append(
            {
                "text": fields["text"],
                "id": np.int64(fields["id"]),
                "score": np.float32(fields["score"]),
            }
        )
    return found


def in_blocks(function):
    """Calls `function` for blocks of records, and drops what it returns."""

    def run(records):
        for begin in range(0, len(records), BLOCK_LEN):
            function(records[begin : begin + BLOCK_LEN])

    return run


def cases():
    """(name, records, function) of each line."""
    records, objects = examples(), texts()
    parse, parse_json = ParseExample(FEATURES), ParseJson(FIELDS)
    dtypes = {"label": np.int64, "tokens": np.int64, "weight": np.float32}
    shapes = {"tokens": (512,)}
    rows = {name: np.empty((NUM, *shapes.get(name, ())), dtype) for name, dtype in dtypes.items()}
    numbers = ParseExample({name: FEATURES[name] for name in rows})
    folder = tempfile.mkdtemp()
    with ArrayRecordWriter(f"{folder}/records", "group_size:1,uncompressed") as writer:
        for record in records * REPEATS:
            writer.write(record)
    source = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(f"{folder}/records"))
    raw, batched = source.shuffle(seed=1), source.shuffle(seed=1).map(parse).batch(100)
    with_orjson = []
    if importlib.util.find_spec("orjson"):
        with_orjson = [("JSON, 3 of 10 fields: orjson loop", objects, in_blocks(by_orjson))]
    return [
        ("Example, 4 features: protobuf loop", records, in_blocks(by_protobuf)),
        ("Example, 4 features: ParseExample", records, in_blocks(parse.map_block)),
        (
            "Example, 4 features: one by one",
            records,
            in_blocks(lambda block: list(map(parse.map, block))),
        ),
        (
            "Example, 3 features: into the rows of a batch",
            records,
            lambda all_: numbers._fill_rows(all_, list(rows.items()), 0),
        ),
        ("records read, shuffled", None, lambda _: deque(raw, maxlen=0)),
        ("records read, shuffled, parsed, batched", None, lambda _: deque(batched, maxlen=0)),
        ("JSON, 3 of 10 fields: ParseJson", objects, in_blocks(parse_json.map_block)),
        *with_orjson,
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print all costs, for compare.py")
    options = parser.parse_args()
    all_cases = cases()
    times = {}
    for number in range(options.rounds + 1):
        for name, records, function in all_cases:
            started_s = time.process_time()
            function(records)
            if number:  # the first calls also set things up
                elapsed_s = time.process_time() - started_s
                num_records = NUM * REPEATS if records is None else NUM
                times.setdefault(name, []).append(elapsed_s / num_records * 1e6)
    if options.json:
        costs = {}
        for name, (case, who) in COMPARED.items():
            if name in times:
                costs.setdefault(case, {})[who] = times[name]
        missing = [name for name in PEERS if not importlib.util.find_spec(name)]
        print(json.dumps({"costs": costs, "missing": missing}))
        return
    print("| case | us CPU per record |")
    print("| --- | --- |")
    for name, all_us in times.items():
        print(f"| {name} | {statistics.median(all_us):.2f} |")


PEERS = ("orjson",)

if __name__ == "__main__":
    main()
