"""What is said to who looks for a method of a dataset that it does not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping


class NotSupportedError(AttributeError, TypeError):
    """Something that a dataset of this kind cannot do.

    An `AttributeError`, as for any attribute that is missing; a `TypeError` as of `[]`.
    """


class Missing:
    """Stands for a special method that a class does not have, to say what to do instead.

    `hasattr` is false for it.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, instance: Any, owner: type[Any]) -> NoReturn:
        raise NotSupportedError(self._text)


def attribute(dataset: Any, name: str, hints: Mapping[str, str], kind: str) -> Any:
    """What `__getattr__` does: raises an `AttributeError`, with a hint if there is one."""
    if name in hints and not hasattr(type(dataset), name):
        raise AttributeError(
            f"{kind} has no method `{name}`: {hints[name]}", name=name, obj=dataset
        )
    return object.__getattribute__(
        dataset, name
    )  # the error of a user's property, or the usual one


_FLAT_MAP = "use `ds.apply(transform)` with a `grain.experimental.FlatMapTransform`"
_NUMBERED = "use `ds.map_with_index(lambda index, element: ...)`"

ITER = {
    "shuffle": "shuffle before `to_iter_dataset()`, or within windows by "
    "`grain.experimental.WindowShuffleIterDataset(ds, window_size=..., seed=...)`",
    "repeat": "repeat before `to_iter_dataset()`, or use "
    "`grain.experimental.RepeatIterDataset(ds, num_epochs)`",
    **dict.fromkeys(
        ("take", "limit", "head"),
        "use `grain.experimental.LimitIterDataset(ds, count)`, or slice the `MapDataset` before "
        "`to_iter_dataset()`",
    ),
    **dict.fromkeys(
        ("skip", "slice", "shard", "select"), "slice the `MapDataset` before `to_iter_dataset()`"
    ),
    "concatenate": "concatenate before `to_iter_dataset()`, by `grain.MapDataset.concatenate`",
    "zip": "use `grain.experimental.ZipIterDataset([ds, other])`",
    "interleave": "use `grain.experimental.InterleaveIterDataset(datasets, cycle_length=...)`",
    "flat_map": _FLAT_MAP,
    "enumerate": _NUMBERED,
    "take_while": "use `grain.experimental.TakeWhileIterDataset(ds, predicate)`",
    **dict.fromkeys(("unbatch", "rebatch"), "use `grain.experimental.RebatchIterDataset`"),
    "to_iter_dataset": "it is an `IterDataset` already",
    "__len__": "its steps may drop elements; `ds.describe()` says how many there are where that is "
    "known, and a `MapDataset` has a length before `to_iter_dataset()`",
}
ITER_INDEX = (
    "elements of an `IterDataset` have no index: use a slice or an index of the `MapDataset` "
    "before `to_iter_dataset()`, or `grain.experimental.LimitIterDataset(ds, count)`"
)
MAP = {
    **dict.fromkeys(("take", "limit", "head"), "use a slice, `ds[:count]`"),
    "skip": "use a slice, `ds[count:]`",
    "shard": "use a slice, `ds[index::count]`",
    "select": "use `ds.slice(indices)`",
    "zip": "use `grain.experimental.ZipMapDataset([ds, other])`",
    "flat_map": _FLAT_MAP,
    "enumerate": _NUMBERED,
    **dict.fromkeys(
        ("mp_prefetch", "prefetch", "get_state", "set_state"),
        "call `to_iter_dataset()` before, and `iter` for what has a state",
    ),
}
