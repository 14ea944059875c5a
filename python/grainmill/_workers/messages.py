"""Serializes elements for another process: arrays in shared slots, everything else pickled.

A list of elements is split into columns, one per leaf. A column of plain arrays of one dtype is
copied into one slot, each array aligned to 64 bytes, and the receiver gets views of that slot. An
array that lies in a shared slot already, such as a batch, is not copied, provided that only the
elements refer to it: its slot then belongs to the receiver. Every other column is pickled, with
the memory of its arrays in the slot too.
"""

from __future__ import annotations

import collections
import io
import pickle
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import cloudpickle
import numpy as np

from grainmill._native import common_layout, dicts_of, slot_of, write_arrays
from grainmill._workers.main_classes import MAIN, is_of_main, receiver_classes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._native import Arena, BorrowedSlot, Slot

# Smaller arrays share a slot.
OWN_SLOT_BYTES = 64 << 10
# A longer header is written into the slot instead of the message.
INLINE_BYTES = 16 << 10
_ALIGNMENT = 64
_MIN_SLOT_BYTES = 4 << 10
_LARGE_SLOT_BYTES = 256 << 10
_MAX_DEPTH = 16
_PROTOCOL = 5


class UnsendableError(Exception):
    """An element that cannot be pickled.

    Attributes:
        position: Its index in the list.
        problem: Which value of it cannot be pickled, and why.
    """

    def __init__(self, position: int, problem: str) -> None:
        super().__init__(position, problem)
        self.position = position
        self.problem = problem


# The pickled description of the columns, or its offset and length in the last slot.
Header = bytes | tuple[int, int]


class Packed(NamedTuple):
    """Elements ready to be sent.

    Attributes:
        header: How to rebuild them.
        slots: The shared slots that hold their memory, not to be written before they are returned.
    """

    header: Header
    slots: list[Slot]


class SlotAllocator(Protocol):
    """Allocates slots for messages."""

    def slot(self, byte_len: int) -> Slot:
        """A slot of `byte_len` bytes in shared memory."""


def pack(elements: list[Any], arena: Arena | SlotAllocator) -> Packed:
    """Writes `elements` into shared memory.

    Raises:
        UnsendableError: An element cannot be pickled.
    """
    writer = _Writer()
    try:
        try:
            column = writer.column(elements, ())
        except _CyclicError:
            writer = _Writer()
            column = writer.pickled(elements)
    except Exception as failure:
        raise _unsendable(elements, failure) from failure
    return writer.finish(column, arena)


class Unpacker:
    """Rebuilds elements; unpickles equal headers, which elements of one kind have, only once."""

    def __init__(self) -> None:
        self._header = b""
        self._column: Any = None

    def unpack(self, header: Header, slots: list[BorrowedSlot]) -> list[Any]:
        """The elements that `pack` returned `header` for; their arrays own their slots."""
        if isinstance(header, tuple):
            offset, length = header
            view = memoryview(slots[-1])  # type: ignore[arg-type]
            return _elements(pickle.loads(view[offset : offset + length]), slots)
        if header != self._header:
            self._column = pickle.loads(header)
            self._header = header
        return _elements(self._column, slots)


class _Writer:
    """Collects the contents of the slot of one message."""

    def __init__(self) -> None:
        self._size = 0
        self._arrays: list[tuple[int, list[Any]]] = []
        self._sent_slots: dict[int, tuple[int, Slot]] = {}

    def _reserve(self, byte_len: int) -> int:
        offset = self._size
        self._size += -(-byte_len // _ALIGNMENT) * _ALIGNMENT
        return offset

    def column(self, values: list[Any], containers: tuple[list[Any], ...]) -> Any:
        """The description from which `_elements` rebuilds `values`.

        Args:
            values: One value for each element.
            containers: The containers of the values at each level, from the elements inwards.
        """
        kind = type(values[0]) if values else None
        if kind is np.ndarray:
            return self._array_column(values, containers)
        if kind in {dict, list, tuple} and len(containers) < _MAX_DEPTH and values[0]:
            names = _common_names(values, kind)
            if names is not None:
                _check_acyclic(values, containers)
                children = [[value[name] for value in values] for name in names]
                columns = [self.column(child, (*containers, values)) for child in children]
                return (kind, list(names) if kind is dict else None, columns)
        return self.pickled(values)

    def _array_column(self, values: list[Any], containers: tuple[list[Any], ...]) -> Any:
        if values[0].nbytes >= OWN_SLOT_BYTES and _is_sole_owner(values, containers):
            slots = [slot_of(value) for value in values]
            shared = [slot_and_offset for slot_and_offset in slots if slot_and_offset is not None]
            if len(shared) == len(slots):
                pairs = zip(values, shared, strict=True)
                return ("in_slots", [self._in_slot(value, *pair) for value, pair in pairs])
        layout = common_layout(values)
        if layout is None:
            return self.pickled(values)
        dtype, shapes, byte_len = layout
        offset = self._reserve(byte_len)
        self._arrays.append((offset, values))
        return ("arrays", offset, shapes.shape, shapes.tobytes(), dtype)

    def _in_slot(self, value: Any, slot: Slot, offset: int) -> Any:
        index, _ = self._sent_slots.setdefault(slot_number(slot), (len(self._sent_slots), slot))
        return index, offset, value.shape, value.dtype

    def pickled(self, values: list[Any]) -> Any:
        """The description of `values` as one pickle, not split into columns."""
        buffers: list[pickle.PickleBuffer] = []
        data = _dumped(values, buffers)
        ranges = [self._appended(buffer) for buffer in buffers]
        if len(data) > INLINE_BYTES:
            return ("pickled", self._appended(data), ranges)
        return ("pickled", data, ranges)

    def _appended(self, buffer: pickle.PickleBuffer | bytes) -> tuple[int, int]:
        raw = buffer.raw() if isinstance(buffer, pickle.PickleBuffer) else buffer
        array = np.frombuffer(raw, np.uint8)
        offset = self._reserve(len(array))
        self._arrays.append((offset, [array]))
        return offset, len(array)

    def finish(self, column: Any, arena: Arena | SlotAllocator) -> Packed:
        slots = [slot for _, slot in self._sent_slots.values()]
        header = pickle.dumps(column, _PROTOCOL)
        header_range = self._appended(header) if len(header) > INLINE_BYTES else None
        if self._arrays:
            slot = arena.slot(_slot_size(self._size))
            for offset, arrays in self._arrays:
                write_arrays(slot, offset, arrays)
            slots.append(slot)
        return Packed(header_range or header, slots)


def slot_number(slot: Slot) -> int:
    """The number that identifies `slot` in messages."""
    number = slot.shared_id
    if number is None:
        raise TypeError("only slots in shared memory can be sent")
    return number


def _slot_size(byte_len: int) -> int:
    """Rounds up, so that messages of different lengths can reuse the same slots."""
    if byte_len > _LARGE_SLOT_BYTES:  # the arena's size classes waste less
        return byte_len
    return max(_MIN_SLOT_BYTES, 1 << (byte_len - 1).bit_length())


def _common_names(values: list[Any], kind: Any) -> Sequence[Any] | None:
    """The keys, in order, or the indices that all of `values` have; `None` if they differ."""
    if set(map(type, values)) != {kind}:
        return None
    if kind is dict:
        names = tuple(values[0])
        if set(map(tuple, values)) != {names}:
            return None
        kinds = tuple(map(type, names))
        if set(kinds) != {str} and any(tuple(map(type, value)) != kinds for value in values):
            return None  # 1 and True are equal
        return names
    return range(len(values[0])) if len(set(map(len, values))) == 1 else None


class _CyclicError(Exception):
    """An element contains itself, so it cannot be split into columns."""


def _check_acyclic(values: list[Any], containers: tuple[list[Any], ...]) -> None:
    """Raises if one of `values` is also one of the containers around it."""
    if containers:
        ids = set(map(id, values))
        if any(not ids.isdisjoint(map(id, outer)) for outer in containers):
            raise _CyclicError


def _max_refcounts(values: list[Any]) -> list[int]:
    """For each value, the highest reference count of it and of the arrays that it is a view of."""
    counts = []
    for value in values:
        count = sys.getrefcount(value)
        base = value.base if isinstance(value, np.ndarray) else None
        while base is not None:
            count = max(count, sys.getrefcount(base))
            base = getattr(base, "base", None)
        counts.append(count)
    return counts


# The count for a view that only a list refers to; it depends on the interpreter.
_LIST_REFCOUNT = max(_max_refcounts([np.empty(2)[:1]]))


def _is_sole_owner(values: list[Any], containers: tuple[list[Any], ...]) -> bool:
    """Whether only the elements refer to the arrays `values` and to the containers around them."""
    levels = (*containers, values)
    # Inside the elements, each value is referred to by its list here and by its container.
    return all(
        max(_max_refcounts(level)) <= _LIST_REFCOUNT + bool(depth)
        for depth, level in enumerate(levels)
    )


def _elements(column: Any, slots: list[BorrowedSlot]) -> list[Any]:
    """The elements of a column; whatever was copied lies in the last slot."""
    kind = column[0]
    if kind == "in_slots":
        return [slots[index].array(*layout) for index, *layout in column[1]]
    if kind == "arrays":
        _, offset, shape, shapes, dtype = column
        layout = np.frombuffer(shapes, np.int64).reshape(shape)
        return list(slots[-1].arrays(offset, layout, dtype))
    if kind == "pickled":
        return _unpickled(column, slots)
    _, names, columns = column
    children = [_elements(child, slots) for child in columns]
    if kind is dict:
        return dicts_of(names, children)
    tuples = zip(*children, strict=True)
    return list(tuples) if kind is tuple else [list(values) for values in tuples]


def _unpickled(column: Any, slots: list[BorrowedSlot]) -> list[Any]:
    _, data, ranges = column

    def view(offset: int, length: int) -> memoryview:
        return memoryview(slots[-1])[offset : offset + length]  # type: ignore[arg-type]

    if isinstance(data, tuple):
        data = view(*data)
    buffers = [view(*offset_and_len) for offset_and_len in ranges]
    return _Unpickler(io.BytesIO(data), buffers=buffers).load()  # type: ignore[no-any-return]


def _dumped(values: Any, buffers: list[pickle.PickleBuffer]) -> bytes:
    try:
        return pickle.dumps(values, _PROTOCOL, buffer_callback=buffers.append)
    except (pickle.PicklingError, AttributeError, TypeError):
        # Classes and functions of the main script, lambdas and the like need `cloudpickle`.
        buffers.clear()
        return dumps(values, buffers.append)


def main_classes() -> dict[str, bool]:
    """The qualified names of the classes in this process's main script, nested ones included.

    The values are true for classes that are registered with JAX as pytree nodes.
    """
    names: dict[str, bool] = {}
    pending = [("", vars(sys.modules[MAIN]))]
    while pending:
        prefix, scope = pending.pop()
        for name, value in list(scope.items()):
            if not isinstance(value, type) or not is_of_main(value):
                continue
            if value.__qualname__ == prefix + name and value.__qualname__ not in names:
                names[value.__qualname__] = _is_registered(value)
                pending.append((f"{prefix}{name}.", dict(vars(value))))
    return names


def _is_registered(kind: type) -> bool:
    tree_util = getattr(sys.modules.get("jax"), "tree_util", None)
    if tree_util is None:
        return False
    try:
        return not tree_util.all_leaves([object.__new__(kind)])
    except Exception:  # a class implemented in C is not registered
        return False


_sent_classes: dict[str, type] = {}


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Sends classes that the receiver has in its main script by name, not by value."""

    def persistent_id(self, value: Any) -> Any:
        if type(value) is io.TextIOWrapper:  # `cloudpickle` would send the text, not the file
            raise TypeError("cannot pickle 'TextIOWrapper' object")
        if isinstance(value, type) and is_of_main(value):
            name = value.__qualname__
            if name in receiver_classes and _sent_classes.setdefault(name, value) is value:
                return name
        return None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, name: str) -> Any:
        if name in _sent_classes:  # the sender itself checks what it can rebuild
            return _sent_classes[name]
        found: Any = sys.modules[MAIN]
        for attribute in name.split("."):
            found = getattr(found, attribute)
        return found


def dumps(
    value: Any, buffer_callback: Callable[[pickle.PickleBuffer], None] | None = None
) -> bytes:
    """Pickles `value`, classes of the main script by name.

    Args:
        value: The value.
        buffer_callback: See `pickle.Pickler`.

    Raises:
        Exception: `value` cannot be pickled.
    """
    file = io.BytesIO()
    _Pickler(file, protocol=_PROTOCOL, buffer_callback=buffer_callback).dump(value)
    return file.getvalue()


def loads(data: bytes) -> Any:
    """The value that `dumps` returned `data` for."""
    return _Unpickler(io.BytesIO(data)).load()


def _unsendable(elements: list[Any], failure: Exception) -> UnsendableError:
    for position, element in enumerate(elements):
        try:
            _dumped(element, [])
        except Exception as cause:
            path, value = _offending(element, "")
            where = f"at `{path}` " if path else ""
            return UnsendableError(
                position, f"{where}a value of type {type(value).__name__}: {_summary(cause)}"
            )
    return UnsendableError(0, _summary(failure))


def _offending(value: Any, path: str) -> tuple[str, Any]:
    """The path to the innermost value that cannot be pickled, and that value."""
    if isinstance(value, dict):
        children = [(f"[{key!r}]", child) for key, child in value.items()]
    elif isinstance(value, list | tuple | set | frozenset | collections.deque):
        children = [(f"[{i}]", child) for i, child in enumerate(value)]
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        indices = np.ndindex(value.shape)
        children = [(f"[{', '.join(map(str, index))}]", value[index]) for index in indices]
    else:
        children = [(f".{name}", child) for name, child in getattr(value, "__dict__", {}).items()]
    for entry, child in children:
        try:
            _dumped(child, [])
        except RecursionError:
            break
        except Exception:
            return _offending(child, path + entry)
    return path, value


def _summary(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"
