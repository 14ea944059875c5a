"""Takes footers of Parquet files apart and puts others together, as old writers have made them."""

import io
import struct

import pyarrow as pa
import pyarrow.parquet as pq

# Kinds of values in the compact encoding of Thrift. A value here is a pair of kind and content; a
# list is a pair of kind and contents, a structure a dict from numbers to values.
TRUE, FALSE, BYTE, I32, I64, DOUBLE, BINARY, LIST, STRUCT = 1, 2, 3, 5, 6, 7, 8, 9, 12


def _varint(value):
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def encoded(kind, content):  # noqa: PLR0911 - a line for each kind
    """A value as it is stored."""
    if kind in {TRUE, FALSE}:  # it is in the head of the field
        return b""
    if kind == BYTE:
        return bytes([content])
    if kind in {I32, I64}:
        return _varint(content << 1 ^ content >> 63)
    if kind == DOUBLE:
        return struct.pack("<d", content)
    if kind == BINARY:
        return _varint(len(content)) + content
    if kind == LIST:
        of, contents = content
        length = len(contents)
        head = bytes([length << 4 | of]) if length < 15 else bytes([0xF0 | of]) + _varint(length)
        return head + b"".join(encoded(of, one) for one in contents)
    out, last = b"", 0
    for number, (of, one) in sorted(content.items()):
        out += bytes([number - last << 4 | of]) + encoded(of, one)
        last = number
    return out + b"\0"


class _Decoder:
    def __init__(self, data):
        self._data = data
        self.at = 0

    def _take(self, count):
        self.at += count
        return bytes(self._data[self.at - count : self.at])

    def _varint(self):
        value = shift = 0
        while True:
            (byte,) = self._take(1)
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def _integer(self):
        value = self._varint()
        return value >> 1 ^ -(value & 1)

    def content(self, kind):  # noqa: PLR0911 - a line for each kind
        if kind in {TRUE, FALSE}:
            return None
        if kind == BYTE:
            return self._take(1)[0]
        if kind in {4, I32, I64}:
            return self._integer()
        if kind == DOUBLE:
            return struct.unpack("<d", self._take(8))[0]
        if kind == BINARY:
            return self._take(self._varint())
        if kind == LIST:
            (head,) = self._take(1)
            length, of = head >> 4, head & 15
            length = self._varint() if length == 15 else length
            return of, [self.content(of) for _ in range(length)]
        found, last = {}, 0
        while head := self._take(1)[0]:
            last = last + (head >> 4) if head >> 4 else self._integer()
            found[last] = head & 15, self.content(head & 15)
        return found


def header_len(data, at):
    """The length of the page header at a position."""
    decoder = _Decoder(data[at:])
    decoder.content(STRUCT)
    return decoder.at


def written(table, **options):
    """A file of a table: what comes before its footer, and the footer."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer, **{"store_schema": False, **options})
    data = buffer.getvalue()
    length = int.from_bytes(data[-8:-4], "little")
    return data[: -8 - length], _Decoder(data[-8 - length : -8]).content(STRUCT)


def row_group(footer, number=0):
    """The structure of a row group."""
    return footer[4][1][1][number]


def column(footer, number=0):
    """The metadata of a column of the first row group."""
    return row_group(footer)[1][1][1][number][3][1]


def joined(body, footer):
    """The file."""
    end = encoded(STRUCT, footer)
    return body + end + len(end).to_bytes(4, "little") + b"PAR1"


def one_page(kind, values, encoding, *, num_rows, levels=None, dictionary=None, is_newer=False):
    """An uncompressed file of an optional column `x` of a physical type, whose values are `values`.

    `levels` says for each row whether it has a value; without, none has.
    """
    levels = levels or [0] * num_rows
    # As many groups of eight levels as needed, of a bit each.
    bits = sum(level << at for at, level in enumerate(levels))
    num_groups = -(-num_rows // 8)
    levels = _varint(num_groups << 1 | 1) + bits.to_bytes(num_groups, "little")
    pages = b""
    if dictionary is not None:
        count, contents = dictionary
        header = {1: (I32, 2), 2: (I32, len(contents)), 3: (I32, len(contents))}
        header[7] = STRUCT, {1: (I32, count), 2: (I32, 0)}
        pages += encoded(STRUCT, header) + contents
    data_at = 4 + len(pages)
    if is_newer:
        contents = levels + values
        head = {1: (I32, num_rows), 2: (I32, num_rows - bits.bit_count()), 3: (I32, num_rows)}
        head |= {4: (I32, encoding), 5: (I32, len(levels)), 6: (I32, 0), 7: (FALSE, None)}
    else:
        contents = len(levels).to_bytes(4, "little") + levels + values
        head = {1: (I32, num_rows), 2: (I32, encoding), 3: (I32, 3), 4: (I32, 3)}
    header = {1: (I32, 3 if is_newer else 0), 2: (I32, len(contents)), 3: (I32, len(contents))}
    header[8 if is_newer else 5] = STRUCT, head
    pages += encoded(STRUCT, header) + contents
    sizes = {number: (I64, len(pages)) for number in (6, 7)}
    metadata = {1: (I32, kind), 2: (LIST, (I32, [encoding])), 3: (LIST, (BINARY, [b"x"]))}
    metadata |= {4: (I32, 0), 5: (I64, num_rows), **sizes, 9: (I64, data_at)}
    if dictionary is not None:
        metadata[11] = I64, 4
    group = {1: (LIST, (STRUCT, [{2: (I64, 4), 3: (STRUCT, metadata)}]))}
    group |= {2: (I64, len(pages)), 3: (I64, num_rows)}
    root = {4: (BINARY, b"schema"), 5: (I32, 1)}
    schema = [root, {1: (I32, kind), 3: (I32, 1), 4: (BINARY, b"x")}]
    footer = {1: (I32, 1), 2: (LIST, (STRUCT, schema)), 3: (I64, num_rows)}
    return joined(b"PAR1" + pages, footer | {4: (LIST, (STRUCT, [group]))})


def int96(days, nanos):
    """A time as INT96: the days since 1970, and nanoseconds of the day."""
    return struct.pack("<qi", nanos, days + 2_440_588)


NUMBERS = pa.table({"x": [1, 2, 3], "y": ["a", None, "b"]})
