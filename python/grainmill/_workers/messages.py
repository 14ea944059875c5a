"""Elements between two processes: arrays in shared slots, everything else pickled beside them.

A list of elements is taken apart column by column. A column of plain arrays of one dtype is
written into one slot, each array aligned to 64 bytes, and arrives as views of it; an array that
lies in a shared slot already, such as a batch, is not even written, provided that nobody here
keeps it: the slot is the receiver's from then on. Whatever is no such column is pickled, with the
memory of its arrays in the slot too.
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

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._native import Arena, BorrowedSlot, Slot

# Arrays of fewer bytes are not worth a slot of their own.
OWN_SLOT_BYTES = 64 << 10
# What a message may hold itself; beyond that its text goes into the slot too.
INLINE_BYTES = 16 << 10
_ALIGNMENT = 64
_SMALLEST_SLOT = 4 << 10
_LARGE_SLOT = 256 << 10
_DEEPEST = 16
_PROTOCOL = 5
_MAIN = "__main__"
# What `multiprocessing` calls the main script in processes it did not fork.
MAIN_OF_CHILD = "__mp_main__"


class UnsendableError(Exception):
    """An element that cannot be pickled.

    Attributes:
        position: Its place in the list.
        problem: What it is about it.
    """

    def __init__(self, position: int, problem: str) -> None:
        super().__init__(position, problem)
        self.position = position
        self.problem = problem


# How to put elements together again, or where in the last of their slots that is written.
Text = bytes | tuple[int, int]


class Packed(NamedTuple):
    """Elements ready to be sent.

    Attributes:
        text: How to put them together again.
        slots: The shared slots that hold their memory, which stay untouched until returned.
    """

    text: Text
    slots: list[Slot]


class SlotMaker(Protocol):
    """Where slots for messages come from."""

    def slot(self, byte_len: int) -> Slot:
        """A slot of `byte_len` bytes in shared memory."""


def pack(elements: list[Any], arena: Arena | SlotMaker) -> Packed:
    """Writes what `elements` hold into shared memory.

    Raises:
        UnsendableError: One of them cannot be pickled.
    """
    writer = _Writer()
    try:
        try:
            column = writer.column(elements, ())
        except _CyclicError:
            writer = _Writer()
            column = writer.pickled(elements)
    except Exception as failure:
        raise _culprit(elements, failure) from failure
    return writer.finish(column, arena)


class Unpacker:
    """Puts elements together again; of elements that are all alike, the texts are equal."""

    def __init__(self) -> None:
        self._text = b""
        self._column: Any = None

    def unpack(self, text: Text, slots: list[BorrowedSlot]) -> list[Any]:
        """The elements that `pack` made `text` of; their arrays keep the slots they lie in."""
        if isinstance(text, tuple):
            offset, length = text
            whole = memoryview(slots[-1])  # type: ignore[arg-type]
            return _elements(pickle.loads(whole[offset : offset + length]), slots)
        if text != self._text:
            self._column = pickle.loads(text)
            self._text = text
        return _elements(self._column, slots)


class _Writer:
    """Collects what goes into the slot of one message."""

    def __init__(self) -> None:
        self._size = 0
        self._arrays: list[tuple[int, list[Any]]] = []
        self._in_place: dict[int, tuple[int, Slot]] = {}

    def _reserve(self, byte_len: int) -> int:
        offset = self._size
        self._size += -(-byte_len // _ALIGNMENT) * _ALIGNMENT
        return offset

    def column(self, values: list[Any], above: tuple[list[Any], ...]) -> Any:
        """What `_elements` needs to make `values` again.

        Args:
            values: One for each element.
            above: What they were taken from, and that from, up to the elements.
        """
        kind = type(values[0]) if values else None
        if kind is np.ndarray:
            return self._array_column(values, above)
        if kind in {dict, list, tuple} and len(above) < _DEEPEST and values[0]:
            names = _common_names(values, kind)
            if names is not None:
                _check_acyclic(values, above)
                children = [[value[name] for value in values] for name in names]
                columns = [self.column(child, (*above, values)) for child in children]
                return (kind, list(names) if kind is dict else None, columns)
        return self.pickled(values)

    def _array_column(self, values: list[Any], above: tuple[list[Any], ...]) -> Any:
        if values[0].nbytes >= OWN_SLOT_BYTES and _held_by_none_else(values, above):
            found = [slot_of(value) for value in values]
            there = [place for place in found if place is not None]
            if len(there) == len(found):
                places = zip(values, there, strict=True)
                return ("there", [self._left(value, *place) for value, place in places])
        layout = common_layout(values)
        if layout is None:
            return self.pickled(values)
        dtype, shapes, byte_len = layout
        offset = self._reserve(byte_len)
        self._arrays.append((offset, values))
        return ("arrays", offset, shapes.shape, shapes.tobytes(), dtype)

    def _left(self, value: Any, slot: Slot, offset: int) -> Any:
        place, _ = self._in_place.setdefault(number_of(slot), (len(self._in_place), slot))
        return place, offset, value.shape, value.dtype

    def pickled(self, values: list[Any]) -> Any:
        """What `_elements` needs to make `values` again, none of it taken apart."""
        buffers: list[pickle.PickleBuffer] = []
        text = _dumped(values, buffers)
        places = [self._placed(buffer) for buffer in buffers]
        if len(text) > INLINE_BYTES:
            return ("pickled", self._placed(text), places)
        return ("pickled", text, places)

    def _placed(self, buffer: pickle.PickleBuffer | bytes) -> tuple[int, int]:
        raw = buffer.raw() if isinstance(buffer, pickle.PickleBuffer) else buffer
        array = np.frombuffer(raw, np.uint8)
        offset = self._reserve(len(array))
        self._arrays.append((offset, [array]))
        return offset, len(array)

    def finish(self, column: Any, arena: Arena | SlotMaker) -> Packed:
        slots = [slot for _, slot in self._in_place.values()]
        text = pickle.dumps(column, _PROTOCOL)
        place = self._placed(text) if len(text) > INLINE_BYTES else None
        if self._arrays:
            slot = arena.slot(_slot_size(self._size))
            for offset, arrays in self._arrays:
                write_arrays(slot, offset, arrays)
            slots.append(slot)
        return Packed(place or text, slots)


def number_of(slot: Slot) -> int:
    """The number by which the parent knows `slot`."""
    number = slot.shared_id
    if number is None:
        raise TypeError("only slots in shared memory can be sent")
    return number


def _slot_size(byte_len: int) -> int:
    """Sizes that come again, so that messages of other lengths share their slots."""
    if byte_len > _LARGE_SLOT:  # the arena's own sizes waste less
        return byte_len
    return max(_SMALLEST_SLOT, 1 << (byte_len - 1).bit_length())


def _common_names(values: list[Any], kind: Any) -> Sequence[Any] | None:
    """The keys, in order, or the places that all of `values` have."""
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
    """An element contains itself, so it cannot be taken apart."""


def _check_acyclic(values: list[Any], above: tuple[list[Any], ...]) -> None:
    """Raises where one of `values` is also among what they were taken from."""
    if above:
        ids = set(map(id, values))
        if any(not ids.isdisjoint(map(id, outer)) for outer in above):
            raise _CyclicError


def _holders(values: list[Any]) -> list[int]:
    """Of each value, the most references there are to it or to an array that it is a view of."""
    counts = []
    for value in values:
        most = sys.getrefcount(value)
        below = value.base if isinstance(value, np.ndarray) else None
        while below is not None:
            most = max(most, sys.getrefcount(below))
            below = getattr(below, "base", None)
        counts.append(most)
    return counts


# How often a view that only a list has is found to be referred to; interpreters differ.
_BY_LIST_ALONE = max(_holders([np.empty(2)[:1]]))


def _held_by_none_else(values: list[Any], above: tuple[list[Any], ...]) -> bool:
    """Whether arrays, and what they lie in, are referred to by the elements sent alone."""
    levels = (*above, values)
    # Below the elements, there is the container beside the list.
    return all(
        max(_holders(level)) <= _BY_LIST_ALONE + bool(depth) for depth, level in enumerate(levels)
    )


def _elements(column: Any, slots: list[BorrowedSlot]) -> list[Any]:
    """The elements of a column; what was not in a slot before lies in the last one."""
    kind = column[0]
    if kind == "there":
        return [slots[place].array(*layout) for place, *layout in column[1]]
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
    made = zip(*children, strict=True)
    return list(made) if kind is tuple else [list(row) for row in made]


def _unpickled(column: Any, slots: list[BorrowedSlot]) -> list[Any]:
    _, text, places = column

    def placed(offset: int, length: int) -> memoryview:
        return memoryview(slots[-1])[offset : offset + length]  # type: ignore[arg-type]

    if isinstance(text, tuple):
        text = placed(*text)
    buffers = [placed(*place) for place in places]
    return _Unpickler(io.BytesIO(text), buffers=buffers).load()  # type: ignore[no-any-return]


def _dumped(values: Any, buffers: list[pickle.PickleBuffer]) -> bytes:
    try:
        return pickle.dumps(values, _PROTOCOL, buffer_callback=buffers.append)
    except (pickle.PicklingError, AttributeError, TypeError):
        # Classes and functions of the main script, lambdas and the like need more than that.
        buffers.clear()
        return dumps(values, buffers.append)


def main_classes() -> dict[str, bool]:
    """The names of the classes that this process's main script has, those within others too.

    Of each, whether the script has registered it with JAX, so that its objects are containers.
    """
    names: dict[str, bool] = {}
    waiting = [("", vars(sys.modules[_MAIN]))]
    while waiting:
        prefix, scope = waiting.pop()
        for name, value in list(scope.items()):
            if not isinstance(value, type) or not _is_of_main(value):
                continue
            if value.__qualname__ == prefix + name and value.__qualname__ not in names:
                names[value.__qualname__] = _is_registered(value)
                waiting.append((f"{prefix}{name}.", dict(vars(value))))
    return names


def _is_registered(kind: type) -> bool:
    tree_util = getattr(sys.modules.get("jax"), "tree_util", None)
    if tree_util is None:
        return False
    try:
        return not tree_util.all_leaves([object.__new__(kind)])
    except Exception:  # a class that is made in C is no container
        return False


_receivers_classes: dict[str, bool] = {}
_sent_classes: dict[str, type] = {}


def expect_classes(names: dict[str, bool]) -> None:
    """Has classes of the main script that the receiver has by these names sent by name."""
    _receivers_classes.update(names)


def is_receivers_container(kind: type) -> bool:
    """Whether objects of this class are containers to the receiver's JAX, by its main script."""
    return _is_of_main(kind) and _receivers_classes.get(kind.__qualname__, False)


def _is_of_main(kind: type) -> bool:
    return kind.__module__ in (_MAIN, MAIN_OF_CHILD)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Names the classes that the receiver has in its main script, instead of copying them."""

    def persistent_id(self, value: Any) -> Any:
        if type(value) is io.TextIOWrapper:  # what `cloudpickle` makes of it is no file
            raise TypeError("cannot pickle 'TextIOWrapper' object")
        if isinstance(value, type) and _is_of_main(value):
            name = value.__qualname__
            if name in _receivers_classes and _sent_classes.setdefault(name, value) is value:
                return name
        return None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, name: str) -> Any:
        if name in _sent_classes:  # this is not the receiver, it only tries
            return _sent_classes[name]
        found: Any = sys.modules[_MAIN]
        for part in name.split("."):
            found = getattr(found, part)
        return found


def dumps(value: Any, keep: Callable[[pickle.PickleBuffer], None] | None = None) -> bytes:
    """`value` as bytes, classes of the main script by name.

    Args:
        value: What to pickle.
        keep: Takes the memory of arrays, which is then left out.

    Raises:
        Exception: It cannot be pickled.
    """
    file = io.BytesIO()
    _Pickler(file, protocol=_PROTOCOL, buffer_callback=keep).dump(value)
    return file.getvalue()


def loads(data: bytes) -> Any:
    """What `dumps` made `data` of."""
    return _Unpickler(io.BytesIO(data)).load()


def _culprit(elements: list[Any], failure: Exception) -> UnsendableError:
    for position, element in enumerate(elements):
        try:
            _dumped(element, [])
        except Exception as cause:
            path, part = _offending(element, "")
            place = f"at `{path}` " if path else ""
            return UnsendableError(
                position, f"{place}a value of type {type(part).__name__}: {_one_line(cause)}"
            )
    return UnsendableError(0, _one_line(failure))


def _offending(part: Any, path: str) -> tuple[str, Any]:
    """The innermost part that cannot be pickled, and the way to it."""
    if isinstance(part, dict):
        inner = [(f"[{key!r}]", value) for key, value in part.items()]
    elif isinstance(part, list | tuple | set | frozenset | collections.deque):
        inner = [(f"[{i}]", value) for i, value in enumerate(part)]
    elif isinstance(part, np.ndarray) and part.dtype.hasobject:
        places = np.ndindex(part.shape)
        inner = [(f"[{', '.join(map(str, place))}]", part[place]) for place in places]
    else:
        inner = [(f".{name}", value) for name, value in getattr(part, "__dict__", {}).items()]
    for entry, value in inner:
        try:
            _dumped(value, [])
        except RecursionError:
            break
        except Exception:
            return _offending(value, path + entry)
    return path, part


def _one_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"
