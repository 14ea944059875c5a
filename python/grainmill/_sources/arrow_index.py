"""Where the record batches of Arrow IPC files and streams are, by the headers of their messages.

`pyarrow` reads batches, but does not say where they are, nor how many rows one has without reading
all of it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np

from grainmill._native import GrainmillError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from grainmill._sources.record_files import Ranges

    Result = TypeVar("Result")
    # It asks for the bytes of ranges, several at once, and is sent these.
    Asking: TypeAlias = Generator[Sequence[Sequence[int]], Sequence[Any], Result]

_MAGIC: Final = b"ARROW1"
_OLD_MAGIC: Final = b"FEA1"
# Before the length of a header, since version 0.15.
_CONTINUATION: Final = b"\xff\xff\xff\xff"
_PREFIX_LEN: Final = 8
_BLOCK: Final = np.dtype([("at", "<i8"), ("header_len", "<i4"), ("_", "<i4"), ("body_len", "<i8")])
_SCHEMA, _DICTIONARIES, _BATCH = 1, 2, 3
_CODECS: Final = {0: "lz4", 1: "zstd"}
# Where messages begin in files, and the length of the footer with the magic after it.
_BEGIN: Final = 8
_TRAILER_LEN: Final = 10
# What is read at once to find a header, or the footer.
_HEAD_LEN: Final = 4 << 10
_TAIL_LEN: Final = 16 << 10
# What damaged tables of flat buffers raise.
_FAILURES: Final = (struct.error, ValueError, OverflowError)


class ArrowIndex(NamedTuple):
    """What is where in a file.

    Attributes:
        byte_len: The bytes of the file.
        schema: The message with the schema.
        dictionaries: Where messages with dictionaries begin and end, one row for each.
        batches: Likewise those with record batches.
        starts: The first row of each batch, and the number of rows.
        codec: What bodies are compressed by, if they are.
        is_stream: Whether a dictionary holds for the batches after it only.
    """

    byte_len: int
    schema: bytes
    dictionaries: Ranges
    batches: Ranges
    starts: Ranges
    codec: str | None
    is_stream: bool

    def needed(self, number: int) -> Ranges:
        """The ranges of the dictionaries that a batch needs."""
        if self.is_stream:
            before: Ranges = self.dictionaries[self.dictionaries[:, 0] < self.batches[number, 0]]
            return before
        return self.dictionaries


class _Message(NamedTuple):
    """What a header says: the kind of its message, the length of the body, the rows of a batch."""

    kind: int
    body_len: int
    num_rows: int
    codec: str | None


class _Place(NamedTuple):
    """A file: its name, its length, and the bytes that it begins with."""

    name: str
    byte_len: int
    head: bytes

    def read(self, begin: int, end: int) -> Asking[bytes]:
        if end <= len(self.head):
            return self.head[begin:end]
        (data,) = yield [(begin, end)]
        return bytes(data)


def index_of(name: str, byte_len: int) -> Asking[ArrowIndex]:
    """Finds the schema and the record batches of a file or stream.

    It yields the ranges that it needs next, and is sent their bytes: so these can be read of many
    files at once.

    Raises:
        GrainmillError: The file is damaged, or no file of Arrow.
    """
    ends = [(0, min(_HEAD_LEN, byte_len)), (max(0, byte_len - _TAIL_LEN), byte_len)]
    head, tail = yield ends
    file = _Place(name, byte_len, bytes(head))
    if file.head.startswith(_MAGIC):
        return (yield from _of_file(file, bytes(tail)))
    if file.head.startswith(_OLD_MAGIC):
        raise GrainmillError(
            f"{name}: a Feather file of version 1, which is not read: write it anew by "
            "`feather.write_feather(feather.read_table(path), path)` of `pyarrow`"
        )
    return (yield from _of_stream(file))


def _of_file(file: _Place, tail: bytes) -> Asking[ArrowIndex]:
    byte_len = file.byte_len
    if byte_len < _BEGIN + _TRAILER_LEN or not tail.endswith(_MAGIC):
        raise _damaged(file, "end", "is not `ARROW1`: the file was cut off, or not closed")
    footer_len = int.from_bytes(tail[-_TRAILER_LEN : -len(_MAGIC)], "little", signed=True)
    end = byte_len - _TRAILER_LEN - footer_len
    if footer_len <= 0 or end < _BEGIN:
        raise _damaged(file, "footer", f"has {footer_len} bytes of {byte_len}")
    footer = tail[:-_TRAILER_LEN][-footer_len:]
    if len(footer) < footer_len:
        footer = yield from file.read(end, end + footer_len)
    try:
        table = _indirect(footer, 0)
        dictionaries, batches = (_blocks(footer, table, number) for number in (2, 3))
    except _FAILURES as failure:
        raise _damaged(file, "footer", failure) from None
    headers = []
    for kind, blocks in (("dictionary", dictionaries), ("record batch", batches)):
        begins, lens = blocks["at"], blocks["header_len"].astype(np.int64)
        rest = end - begins - lens  # which cannot overflow where `begins` is within the file
        bad = (begins < _BEGIN) | (begins > end) | (lens < _BEGIN) | (blocks["body_len"] < 0)
        bad |= rest < blocks["body_len"]
        if bad.any():
            place = f"footer, {kind} {int(bad.argmax())}"
            raise _damaged(file, place, "is not within the file")
        headers.append(np.stack([begins, begins + lens], axis=1))
    first, schema_end = yield from _message_at(file, _BEGIN, end)
    if first is None or first.kind != _SCHEMA:
        raise _damaged(file, f"byte {_BEGIN}", "is no schema")
    messages = []
    for number, data in enumerate((yield headers[1].tolist())):
        place = f"record batch {number}"
        message = _message(file, place, data)
        if message.kind != _BATCH or message.body_len != batches["body_len"][number]:
            raise _damaged(file, place, "is not what the footer says")
        messages.append(message)
    ends = [
        each[:, 1] + blocks["body_len"]
        for each, blocks in zip(headers, (dictionaries, batches), strict=True)
    ]
    ranges = [np.stack([each[:, 0], end], axis=1) for each, end in zip(headers, ends, strict=True)]
    schema = yield from file.read(_BEGIN, schema_end)
    return _indexed(file, schema, ranges, messages, is_stream=False)


def _of_stream(file: _Place) -> Asking[ArrowIndex]:
    at, byte_len = 0, file.byte_len
    found: dict[int, list[tuple[int, int]]] = {_SCHEMA: [], _DICTIONARIES: [], _BATCH: []}
    messages = []
    while at < byte_len:
        message, end = yield from _message_at(file, at, byte_len)
        if message is None:  # the mark of the end
            break
        if message.kind not in found or (message.kind == _SCHEMA) != (at == 0):
            raise _damaged(file, f"byte {at}", f"a message of kind {message.kind}")
        found[message.kind].append((at, end))
        if message.kind == _BATCH:
            messages.append(message)
        at = end
    if not found[_SCHEMA]:
        raise _damaged(file, "byte 0", "is no schema: this is no Arrow file or stream")
    ranges = [np.array(found[kind], np.int64).reshape(-1, 2) for kind in (_DICTIONARIES, _BATCH)]
    schema = yield from file.read(*found[_SCHEMA][0])
    return _indexed(file, schema, ranges, messages, is_stream=True)


def _indexed(
    file: _Place,
    schema: bytes,
    ranges: Sequence[Ranges],
    messages: list[_Message],
    *,
    is_stream: bool,
) -> ArrowIndex:
    counts = [message.num_rows for message in messages]
    if sum(counts) >= 1 << 62:
        raise _damaged(file, "record batches", f"have {sum(counts)} rows")
    starts = np.cumsum([0, *counts], dtype=np.int64)
    codec = next((message.codec for message in messages if message.codec), None)
    dictionaries, batches = ranges
    return ArrowIndex(file.byte_len, schema, dictionaries, batches, starts, codec, is_stream)


def _message_at(file: _Place, begin: int, limit: int) -> Asking[tuple[_Message | None, int]]:
    """The message at `begin`, and where its body ends; `None` for the mark of a stream's end."""
    place = f"byte {begin}"
    head = file.head[begin:limit]
    if len(head) < _PREFIX_LEN:
        head = yield from file.read(begin, min(begin + _HEAD_LEN, limit))
    prefix_len = _PREFIX_LEN if head.startswith(_CONTINUATION) else 4
    if len(head) < prefix_len:
        raise _damaged(file, place, f"ends within {prefix_len} bytes")
    header_len = int.from_bytes(head[prefix_len - 4 : prefix_len], "little")
    end = begin + prefix_len + header_len
    if not header_len:
        return None, end
    if end > limit:
        raise _damaged(file, place, f"a header of {header_len} bytes reaches beyond the end")
    if end - begin > len(head):
        head = yield from file.read(begin, end)
    message = _message(file, place, head[: end - begin])
    if end + message.body_len > limit:
        raise _damaged(file, place, f"a body of {message.body_len} bytes reaches beyond the end")
    return message, end + message.body_len


def _message(file: _Place, place: str, head: Any) -> _Message:
    """What the header of a message says, with what precedes it."""
    data = bytes(head)
    data = data[8:] if data.startswith(_CONTINUATION) else data[4:]
    try:
        table = _indirect(data, 0)
        kind = _number(data, table, 1, "<B")
        body_len = _number(data, table, 3, "<q")
        num_rows, codec = 0, None
        if kind == _BATCH:
            batch = _indirect(data, _field(data, table, 2))
            num_rows = _number(data, batch, 0, "<q")
            if compression := _field(data, batch, 3):
                code = _number(data, _indirect(data, compression), 0, "<b")
                codec = _CODECS.get(code, f"codec {code}")
        if min(body_len, num_rows) < 0:
            raise ValueError(f"{body_len} bytes and {num_rows} rows")
    except _FAILURES as failure:
        raise _damaged(file, place, f"a damaged header: {failure}") from None
    return _Message(kind, body_len, num_rows, codec)


def _damaged(file: _Place, place: str, problem: object) -> GrainmillError:
    return GrainmillError(f"{file.name}: {place}: {problem}")


# --- flat buffers ---------------------------------------------------------------------------------


def _indirect(data: bytes, at: int) -> int:
    """Where the table or vector is that `at` refers to."""
    target: int = at + struct.unpack_from("<I", data, at)[0]
    return target


def _field(data: bytes, table: int, number: int) -> int:
    """Where a field of a table is; 0 if the table has none."""
    fields = table - struct.unpack_from("<i", data, table)[0]
    if fields < 0:
        raise ValueError(f"fields at {fields}")
    at = 4 + 2 * number
    if at >= struct.unpack_from("<H", data, fields)[0]:
        return 0
    offset: int = struct.unpack_from("<H", data, fields + at)[0]
    return table + offset if offset else 0


def _number(data: bytes, table: int, number: int, layout: str) -> int:
    """The number in a field, which is 0 where it is left out."""
    at = _field(data, table, number)
    value: int = struct.unpack_from(layout, data, at)[0] if at else 0
    return value


def _blocks(data: bytes, table: int, number: int) -> Any:
    """Where messages are, by a field of the footer."""
    at = _field(data, table, number)
    if not at:
        return np.zeros(0, _BLOCK)
    vector = _indirect(data, at)
    count = struct.unpack_from("<I", data, vector)[0]
    return np.frombuffer(data, _BLOCK, count, vector + 4)
