"""Elements as bytes: arrays are copied as they lie in memory, only what holds them is pickled."""

from __future__ import annotations

import pickle
import struct
from typing import Any, Final

MISSING: Final = object()
"""What a store gives in place of an element that it does not have."""

# The first byte: a `bytes` object as it is, or a pickle that is followed by its buffers.
_BYTES: Final = b"\0"
_PICKLED: Final = 1
# The kind, the number of buffers, the length of the pickle; the length of each buffer follows.
_HEADER: Final = struct.Struct("<B3xIQ")
# The allocator aligns memory to this, so arrays of all dtypes of the record are aligned.
_ALIGNMENT: Final = 16


def encoded(element: Any) -> list[Any]:
    """An element as pieces of bytes, which are stored one after another.

    Raises:
        TypeError: The element cannot be pickled.
    """
    if type(element) is bytes:
        return [_BYTES, element]
    buffers: list[pickle.PickleBuffer] = []
    try:
        data = pickle.dumps(element, protocol=5, buffer_callback=buffers.append)
    except Exception as failure:
        raise TypeError(
            f"an element of type {type(element).__name__} cannot be cached, as it cannot be "
            f"pickled: {failure}; put `cache` upstream of the stage that makes such elements"
        ) from failure
    views = [buffer.raw() for buffer in buffers]
    header = _HEADER.pack(_PICKLED, len(views), len(data))
    lengths = struct.pack(f"<{len(views)}Q", *(len(view) for view in views))
    pieces: list[Any] = [header, lengths, data]
    at = len(header) + len(lengths) + len(data)
    for view in views:
        padding = -at % _ALIGNMENT
        pieces += [bytes(padding), view]
        at += padding + len(view)
    return pieces


def decoded(record: bytearray | bytes) -> Any:
    """The element that `encoded` made the record of.

    Args:
        record: The bytes. Arrays share the memory of a `bytearray`, so it must not be used for
            anything else; `bytes` are copied first, or arrays could not be written to.
    """
    if not record[0]:
        return bytes(memoryview(record)[1:])
    if isinstance(record, bytes):
        record = bytearray(record)
    view = memoryview(record)
    _, count, size = _HEADER.unpack_from(view)
    start = _HEADER.size + 8 * count
    at = start + size
    if not count:
        return pickle.loads(view[start:at])
    buffers = []
    for length in struct.unpack_from(f"<{count}Q", view, _HEADER.size):
        at += -at % _ALIGNMENT
        buffers.append(view[at : at + length])
        at += length
    return pickle.loads(view[start : start + size], buffers=buffers)
