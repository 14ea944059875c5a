"""Slow, obvious twins of the formats that the engine reads, and writers of small files."""

import bz2
import gzip
import io
import itertools
import json
import lzma
import random
import re
import struct
import tarfile
import zlib

import pyarrow as pa


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 if crc & 1 else crc >> 1
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def tfrecord(records):
    """A TFRecord file."""
    parts = []
    for record in records:
        length = struct.pack("<Q", len(record))
        parts += [length, struct.pack("<I", masked(length)), record]
        parts += [struct.pack("<I", masked(record))]
    return b"".join(parts)


def tfrecords(data):
    """The records of a TFRecord file, and whether it is intact."""
    records, at = [], 0
    while at < len(data):
        head = data[at : at + 12]
        if len(head) < 12 or masked(head[:8]) != struct.unpack("<I", head[8:])[0]:
            return records, False
        (length,) = struct.unpack("<Q", head[:8])
        record, tail = data[at + 12 : at + 12 + length], data[at + 12 + length :][:4]
        if len(tail) < 4 or masked(record) != struct.unpack("<I", tail)[0]:
            return records, False
        records.append(record)
        at += 16 + length
    return records, True


def json_lines(data):
    """The lines of a file that are not blank."""
    lines = [line.removesuffix(b"\r") for line in data.split(b"\n")]
    lines = [re.sub(rb"\A(?:\xef\xbb\xbf)+", b"", line) for line in lines]
    return [line for line in lines if line.strip(b" \t\r")]


def is_binary(data):
    """Whether what may be lines begins with bytes that no text has."""
    return re.search(rb"[\0-\x06\x0e-\x1a]", data[:4096]) is not None


def begins_as_other(data):
    """Whether what may be lines begins as text in UTF-16 does, or what a compressor wrote."""
    utf_16, gzip_or_zlib = rb"\xff\xfe|\xfe\xff", rb"\x1f\x8b|x[\x01\x5e\x9c\xda]"
    xz_or_bzip2 = rb"\xfd7zXZ\0|BZh[1-9](?:\x31\x41\x59\x26\x53\x59|\x17\x72\x45\x38\x50\x90)"
    zstd_frame = rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"
    marks = b"|".join([utf_16, gzip_or_zlib, xz_or_bzip2, zstd_frame])
    return re.match(marks, data) is not None


def samples(data):
    """The samples of a WebDataset file, in order."""
    found = []
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = archive.getmembers()
    for info in members:
        directory, _, name = info.name.removeprefix("./").rpartition("/")
        base, dot, extension = name.partition(".")
        if not info.isreg() or not base or not dot:
            continue
        key = f"{directory}/{base}" if directory else base
        if not found or found[-1]["__key__"] != key:
            found.append({"__key__": key})
        start = info.offset_data
        found[-1][extension.lower()] = data[start : start + info.size]
    return found


def tar(files, tar_format=tarfile.PAX_FORMAT):
    """A tar file of `(name, content)`; content `None` makes a directory."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format) as archive:
        for name, content in files:
            info = tarfile.TarInfo(name)
            if content is None:
                info.type = tarfile.DIRTYPE
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def end_of(info):
    """Where a file in a tar file ends."""
    return info.offset_data + -(-info.size // 512) * 512


def without_end(data):
    """A tar file without the zeros at its end."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return data[: max(map(end_of, archive.getmembers()), default=0)]


def bagz(records):
    """A Bagz file without compression."""
    ends, end = [], 0
    for record in records:
        end += len(record)
        ends.append(end)
    return b"".join(records) + struct.pack(f"<{len(ends)}Q", *ends)


def zstd(data):
    return pa.compress(data, "zstd", asbytes=True)


def skippable(data):
    """A frame that readers of zstd pass over, as that of a table of seekable zstd."""
    return b"\x51\x2a\x4d\x18" + struct.pack("<I", len(data)) + data


def frames(data):
    """Frames of zstd of random lengths, also empty ones and some to be passed over."""
    rng, at, parts = random.Random(len(data)), 0, [skippable(b"table")]
    while at < len(data):
        end = at + rng.choice([0, 1, rng.randrange(100), rng.randrange(1 + len(data) // 4)])
        parts += [zstd(data[at:end]), skippable(bytes(end % 70))][: rng.choice([1, 1, 2])]
        at = end
    return b"".join(parts)


def compressed(data, how):
    whole = {"zstd": zstd, "frames": frames, "zlib": zlib.compress}
    whole |= {"xz": lzma.compress, "bzip2": bz2.compress}
    if how in whole:
        return whole[how](data)
    if how == "gzip":
        return gzip.compress(data, mtime=0)
    if how == "members":
        cut = len(data) // 3
        return gzip.compress(data[:cut], mtime=0) + gzip.compress(data[cut:], mtime=0)
    if how in {"xz streams", "bzip2 streams"}:
        compress, padding = whole[how.split()[0]], bytes(8) if how[0] == "x" else b""
        cuts = [0, len(data) // 9, len(data) // 9, len(data) // 2, len(data)]
        parts = (compress(data[a:b]) for a, b in itertools.pairwise(cuts))
        return padding.join(parts)
    if how == "padded":
        cut, zeros = len(data) // 2, bytes(len(data) % 700)
        first, second = gzip.compress(data[:cut], mtime=0), gzip.compress(data[cut:], mtime=0)
        return first + zeros + second + zeros[1:]
    return data


def json_text(objects):
    return "".join(json.dumps(each) + "\n" for each in objects).encode()
