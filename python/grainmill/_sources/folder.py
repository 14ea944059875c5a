"""A source of whole files, such as images in folders; `grainmill.sources` has its name."""

from __future__ import annotations

import operator
import os
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from grainmill import _native
from grainmill._sources.paths import below, expand, file_range, listed
from grainmill._sources.record_files import digest_of
from grainmill._url import identified, is_url, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from grainmill._sources.record_files import Paths


class FolderDataSource:
    """Whole files, such as images in one folder for each class, as one sequence of dicts.

    An element has the bytes of a file and, if asked for, the number of its class and its path:
    `{"data": b"...", "label": 3, "path": "images/dog/1.jpg"}`. A folder stands for all files below
    it, without those whose name, or a folder of theirs, starts with `.` or `_`. Its files, and
    those of a pattern, are in sorted order. They are listed once, when the source is made, and
    opened when they are read.

    States of a `DataLoader`, and checkpoints, contain `repr`, which has a hash of the paths and
    labels: they are refused once files were added, removed or renamed.

    Args:
        paths: A path or a sequence of paths, as for `expand_paths`: files, patterns such as
            `images/*/*.jpg`, or folders, also in buckets.
        labels: `"folder"` for the name of the folder that a file is in, or, where `paths` names a
            folder, of the one below it; a function from a path to the name of its class; `None`
            for elements without `label`.
        class_names: The names of the classes, if others than those of the files, in sorted order:
            those of the training set for the files that it is compared with.
        feature: The name of the bytes in an element.
        with_paths: Whether elements have `path`. JAX takes no text, so drop it before a batch is
            put onto a device.

    Attributes:
        class_names: The name of each label; empty without labels.

    Raises:
        ValueError: There is no path, `labels` is unknown, a file is in no folder or in none of
            `class_names`, these repeat a name, `feature` is "label" or "path", or a path has a
            range.
        FileNotFoundError: There is no such file or folder, or none that matches.

    Example:
        >>> from pathlib import Path
        >>> for name in ("cat/1.jpg", "dog/1.jpg", "dog/2.jpg"):
        ...     Path(name).parent.mkdir(exist_ok=True)
        ...     _ = Path(name).write_bytes(jpeg)
        >>> source = grain.sources.FolderDataSource("*/*.jpg", labels="folder", feature="image")
        >>> source.class_names, [element["label"] for element in source]
        (['cat', 'dog'], [0, 1, 1])
        >>> decode = grain.transforms.DecodeImage("image", size=(64, 64))
        >>> batch = grain.MapDataset.source(source).shuffle(seed=1).map(decode).batch(3)[0]
        >>> batch["image"].shape
        (3, 64, 64, 3)
    """

    def __init__(
        self,
        paths: Paths,
        *,
        labels: str | Callable[[str], str] | None = None,
        class_names: Sequence[str] | None = None,
        feature: str = "data",
        with_paths: bool = False,
    ) -> None:
        if labels is not None and labels != "folder" and not callable(labels):
            raise ValueError(
                f'`labels` must be "folder", a function of a path or `None`, got {labels!r}'
            )
        if feature in {"label", "path"}:
            raise ValueError(
                f"`feature` must differ from the names of other values, got {feature!r}"
            )
        found = [file for path in listed(paths) for file in _files(path)]
        self._paths = [path for path, _ in found]
        # A worker may read them from another directory.
        self._directory = os.getcwd()  # noqa: PTH109 - a `Path` costs far more
        self._feature = feature
        self._with_paths = with_paths
        self.class_names: list[str] = []
        self._labels: np.ndarray[tuple[int], np.dtype[np.int32]] | None = None
        if labels is None:
            if class_names is not None:
                raise ValueError('`class_names` needs `labels`, such as `labels="folder"`')
        else:
            names = [
                labels(path) if callable(labels) else _folder(path, folder)
                for path, folder in found
            ]
            self.class_names = sorted(set(names)) if class_names is None else list(class_names)
            self._labels = self._numbers(names)
        self._repr: str | None = None

    def _numbers(self, names: list[str]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """The labels of files whose classes have these names."""
        number_of = {name: number for number, name in enumerate(self.class_names)}
        if len(number_of) != len(self.class_names):
            raise ValueError(f"`class_names` must differ from each other, got {self.class_names}")
        for path, name in zip(self._paths, names, strict=True):
            if name not in number_of:
                raise ValueError(
                    f"{shown(path)}: its class {name!r} is none of the {len(number_of)} in "
                    "`class_names`; add it there, or leave the file out of `paths`"
                )
        return np.array([number_of[name] for name in names], np.int32)

    @property
    def paths(self) -> list[str]:
        """The paths of the files, in the order of elements."""
        return list(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, record_key: SupportsIndex) -> dict[str, Any]:
        key = operator.index(record_key)
        if not 0 <= key < len(self._paths):
            raise IndexError(f"file {key} was requested, but there are {len(self._paths)}")
        path = self._paths[key]
        element: dict[str, Any] = {self._feature: _native.read_object(self._absolute(path))}
        if self._labels is not None:
            element["label"] = int(self._labels[key])
        if self._with_paths:
            element["path"] = path
        return element

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self)):
            yield self[index]

    def _absolute(self, path: str) -> str:
        return path if is_url(path) else os.path.join(self._directory, path)  # noqa: PTH118 - as above

    def __repr__(self) -> str:
        """Saved states contain this text, so it must not change."""
        if self._repr is None:  # made once, as there may be millions of paths
            labels = None if self._labels is None else self._labels.tolist()
            arguments = (labels, self.class_names, self._feature, self._with_paths)
            self._repr = f"FolderDataSource(hash_of_paths={digest_of(self._paths, arguments)})"
        return self._repr

    def _record_location(self, index: int) -> tuple[str, int]:
        """The file of element `index`, for messages."""
        return shown(self._absolute(self._paths[index])), 0


def _files(path: object) -> Iterator[tuple[str, str]]:
    """The files that one path stands for, each with the name of its folder, or an empty one."""
    one = file_range(path)
    if one.take is not None:
        raise ValueError(f"{shown(one.path)}: files are read whole, not by a range of records")
    directory = below(one.path)
    if directory is not None:
        root, names = directory
        for name in names:
            first, separator, _ = name.replace(os.sep, "/").partition("/")
            yield root + name, first if separator else ""
        return
    files = expand(path)
    if files == [one.path] and not is_url(one.path) and not os.path.lexists(one.path):
        raise FileNotFoundError(f"there is no such file or folder: {one.path!r}")
    for file in files:
        parent = os.path.dirname(identified(file))  # noqa: PTH120 - it may be a URL
        yield file, os.path.basename(parent)  # noqa: PTH119 - as above


def _folder(path: str, folder: str) -> str:
    """The name of a file's folder, which is that of its class."""
    if folder in {"", os.curdir, os.pardir}:
        raise ValueError(
            f"{shown(path)}: no folder names the class of this file, as in `images/cat/1.jpg`; "
            "leave it out of `paths`, or pass a function as `labels`"
        )
    return folder
