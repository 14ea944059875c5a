"""Writes `tf_example.json`: messages, and the values that TensorFlow parses from them.

It needs TensorFlow, which the tests do without: run it by a Python that has this. With the version
that the file names, the result is the same, byte by byte.
"""

import json
import random
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import tensorflow as tf
from oracle_example import bytes_list, entry, example, float_list, int64_list, part, varint

TARGET = Path(__file__).with_suffix(".json")
DEFAULTS = {"int64": -7, "float32": 0.5, "bytes": b"none"}
KINDS = list(DEFAULTS)
NUM_RANDOM = 150

# The kind, the shape, and whether there is a default.
PAIR = {"x": ("int64", [2], False)}
PAIR_OR_DEFAULT = {"x": ("int64", [2], True)}
ANY = {"x": ("int64", [-1], False)}
PAIRS = {"x": ("int64", [-1, 2], False)}


ONE, TWO, KEY = int64_list([5]), int64_list([5, 6]), part(1, b"x")


def x(value):
    """A message with one feature."""
    return example(x=value)


def of_entry(*parts):
    """A message with one entry of these fields."""
    return part(1, part(1, b"".join(parts)))


def of_list(*parts):
    """A message with an `int64_list` of these fields."""
    return x(part(3, b"".join(parts)))


def lists_in_entries():
    """Features that are missing, twice there, of another kind or number, or written unusually."""
    one, two, floats = ONE, TWO, float_list([5, 6])
    first, second = entry("x", int64_list([1, 2])), entry("x", int64_list([3, 4]))
    unset = entry("x", b"")
    wrong_first = entry("x", float_list([1, 2])) + second
    yield "dup", part(1, first + second), PAIR
    yield "dup var", part(1, first + second), ANY
    yield "dup last unset", part(1, first + unset), PAIR_OR_DEFAULT
    yield "dup first wrong kind", part(1, wrong_first), PAIR_OR_DEFAULT
    yield "split", part(1, first) + part(1, second), PAIR
    yield "split2", part(1, first) + part(1, entry("y", int64_list([3, 4]))), PAIR
    yield "missing", example(), PAIR
    yield "missing d", example(), PAIR_OR_DEFAULT
    yield "empty rec d", b"", PAIR_OR_DEFAULT
    yield "missing v", example(), ANY
    yield "unset kind", part(1, unset), PAIR
    yield "unset kind d", part(1, unset), PAIR_OR_DEFAULT
    yield "empty list d", x(int64_list([])), PAIR_OR_DEFAULT
    yield "empty list2 d", of_list(), PAIR_OR_DEFAULT
    yield "empty list v", of_list(), ANY
    yield "unpacked", x(int64_list([5, -6], packed=False)), PAIR
    yield "mixed", of_list(part(1, b"\x05"), b"\x08\x06"), PAIR
    yield "two packed", of_list(part(1, b"\x05"), part(1, b"\x06")), PAIR
    yield "two lists", x(one + int64_list([6])), PAIR
    yield "two lists d", x(two + int64_list([6, 7])), PAIR
    yield "two kinds", x(float_list([5]) + int64_list([6, 7])), PAIR
    yield "wrong", x(floats), PAIR
    yield "wrong v", x(floats), ANY
    yield "wrong count", x(one), PAIR


def fields():
    """Messages with unknown, repeated, unordered, cut or invalid fields."""
    one, two, key, unknown = ONE, TWO, KEY, part(9, b"zz")
    yield "unknown in example", unknown + x(two) + varint(15 << 3) + b"\x01", PAIR
    yield "unknown in features", part(1, part(7, b"zz") + entry("x", two)), PAIR
    yield "unknown in entry", of_entry(key, part(2, two), part(3, b"q")), PAIR
    yield "unknown in feature", x(part(9, b"q") + two), PAIR
    yield "unknown in feature after", x(two + part(9, b"q")), PAIR
    yield "unknown in list", of_list(part(1, b"\x05\x06"), part(9, b"q")), PAIR
    yield "value before key", of_entry(part(2, two), key), PAIR
    yield "no key", of_entry(part(2, two)), {"": PAIR["x"]}
    yield "no value", of_entry(key), PAIR_OR_DEFAULT
    yield "key twice", of_entry(part(1, b"y"), key, part(2, two)), PAIR
    twice = of_entry(key, part(2, one), part(2, int64_list([6])))
    yield "value twice", twice, PAIR
    yield "value twice2", twice, ANY
    yield "long varint", of_list(part(1, b"\xff" * 9 + b"\x7f" + b"\x05")), PAIR
    yield "too long varint", of_list(part(1, b"\xff" * 10 + b"\x01" + b"\x05")), ANY
    yield "cut varint", of_list(part(1, b"\x05\xff")), ANY
    yield "cut", x(two)[:-1], PAIR
    yield "cut floats", x(part(2, part(1, b"abcde"))), {"x": ("float32", [-1], False)}
    unpacked = float_list([1.5, 2.5], packed=False)
    yield "unpacked f", x(unpacked), {"x": ("float32", [-1], False)}
    yield "bytes", x(bytes_list([b"a", b"", b"c\0"])), {"x": ("bytes", [-1], False)}
    yield "group", b"\x0b\x0c" + x(two), PAIR
    yield "field0", b"\x02\x00" + x(two), PAIR
    yield "long tag", b"\x8a\x00" + x(two)[1:], PAIR
    yield "example dup scalar", x(one), {"x": ("int64", [], False)}
    yield "fixedseq", x(int64_list([5, 6, 7, 8])), PAIRS
    yield "fixedseq bad", x(int64_list([5, 6, 7])), PAIRS


class RandomCases:
    """Messages with random features, a few of them wrong. The file depends on every call."""

    def __init__(self, seed):
        self._random = random.Random(seed)

    def __iter__(self):
        for number in range(NUM_RANDOM):
            yield f"random {number}", *self._case()
        tokens = int64_list([self._random.randrange(50000) for _ in range(64)])
        spec = {"a": ("int64", [64], False), "b": ("float32", [-1], False)}
        yield "long lists", example(a=tokens, b=float_list(range(300))), spec

    def _case(self):
        rng = self._random
        spec, entries = {}, []
        for name in "abcdef"[: rng.randrange(1, 7)]:
            kind = rng.choice(KINDS)
            shape = rng.choice([[], [], [3], [2, 2], [-1], [-1], [-1, 2]])
            is_ragged = shape[:1] == [-1]
            default = not is_ragged and rng.random() < 0.5
            spec[name] = (kind, shape, default)
            count = int(np.prod([length for length in shape if length > 0]))
            if is_ragged:
                count *= rng.randrange(0, 4)
            if rng.random() < 0.05:
                count += 1
            if rng.random() < 0.1:
                continue
            for _ in range(1 + (rng.random() < 0.15)):
                own = kind if rng.random() < 0.97 else rng.choice(KINDS)
                entries.append(entry(name, self._feature(own, count)))
            if rng.random() < 0.05:
                entries.append(entry(name, b""))
            if rng.random() < 0.2:
                other = rng.choice(["zz", "", "aa"])
                entries.append(entry(other, self._feature(rng.choice(KINDS), 2)))
        rng.shuffle(entries)
        cut = rng.randrange(len(entries) + 1)
        record = part(1, b"".join(entries[:cut]))
        record += part(9, b"zz") if rng.random() < 0.2 else b""
        if cut < len(entries) or rng.random() < 0.5:
            record += part(1, b"".join(entries[cut:]))
        if rng.random() < 0.05:
            record = record[: rng.randrange(len(record) + 1)]
        return record, spec

    def _feature(self, kind, count):
        rng = self._random
        packed = rng.random() < 0.7
        if kind == "int64":
            return int64_list([self._integer() for _ in range(count)], packed=packed)
        if kind == "float32":
            floats = [struct.pack("<f", rng.uniform(-9, 9)) for _ in range(count)]
            return float_list([struct.unpack("<f", one)[0] for one in floats], packed=packed)
        return bytes_list(
            bytes(rng.randrange(256) for _ in range(rng.randrange(6))) for _ in range(count)
        )

    def _integer(self):
        rng = self._random
        limits = [2**31, -(2**63), 2**63 - 1]
        others = [rng.randrange(50000), rng.randrange(-(2**62), 2**62)]
        return rng.choice([0, 1, -1, 127, 128, 300, *limits, *others])


def by_tensorflow(record, spec):
    """The values of the features, as in the file; `None` if TensorFlow refuses the message."""
    dtypes = {"int64": tf.int64, "float32": tf.float32, "bytes": tf.string}
    features = {}
    for name, (kind, shape, default) in spec.items():
        dtype = dtypes[kind]
        if shape == [-1]:
            features[name] = tf.io.VarLenFeature(dtype)
        elif shape[:1] == [-1]:
            features[name] = tf.io.FixedLenSequenceFeature(shape[1:], dtype, allow_missing=True)
        else:
            value = np.array(DEFAULTS[kind], object if kind == "bytes" else None)
            filled = np.broadcast_to(value, shape).tolist() if default else None
            features[name] = tf.io.FixedLenFeature(shape, dtype, filled)
    try:
        found = tf.io.parse_single_example(record, features)
    except (tf.errors.OpError, ValueError):
        return None
    return {name: shown(getattr(value, "values", value).numpy()) for name, value in found.items()}


def shown(value):
    """A value as JSON has it: bytes are hexadecimal, and an array of them has its shape."""
    if isinstance(value, bytes):
        return value.hex()
    if value.dtype == object:
        return [one.hex() for one in value.ravel()], list(value.shape)
    return value.tolist()


def main():
    cases = [
        {
            "name": name,
            "record": record.hex(),
            "spec": spec,
            "expected": by_tensorflow(record, spec),
        }
        for name, record, spec in [*RandomCases(17), *lists_in_entries(), *fields()]
    ]
    content = {"tensorflow": tf.__version__, "cases": cases}
    TARGET.write_text(json.dumps(content, separators=(",", ":")), "utf-8")


if __name__ == "__main__":
    main()
