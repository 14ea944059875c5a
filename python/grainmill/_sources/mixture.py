"""Weighted mixtures given as text, as on a command line or in a configuration file."""

from __future__ import annotations

import dataclasses
import math
import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeVar

from grainmill._dataset.iter_dataset import IterDataset, PlannedIterDataset, node_of, nodes_of
from grainmill._dataset.map_dataset import MapDataset, PlannedMapDataset
from grainmill._iterators.mix import Mix
from grainmill._plan import random_access
from grainmill._url import identified, shown

if TYPE_CHECKING:
    from collections.abc import Callable

AnyDataset = TypeVar("AnyDataset", bound="MapDataset[Any] | IterDataset[Any]")

# A decimal number after the last comma, or else after the last colon, is a weight.
_WEIGHTED = re.compile(
    r"(?P<path>.*\S)\s*(?:,|:)\s*(?P<weight>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)", re.DOTALL
)
# What another number than a weight looks like there.
_MISTAKEN = re.compile(r".*\S\s*[,:]\s*([+-]?(?:nan|inf(?:inity)?))", re.DOTALL | re.IGNORECASE)
# The engine counts turns with 63 bits.
_MAX_PROPORTION = 1 << 62


def parse_mixture(text: str) -> dict[str, Fraction]:
    r"""Reads a mixture such as `"a/*.array_record:0.3;b/*.array_record:0.7"`.

    Entries are separated by `;`. A weight follows the path after `:` or `,`, and is a positive
    decimal number; without weights, all are equal. Colons elsewhere belong to the path, as in
    `gs://bucket/a:0.3`, `http://host:80/a` or `C:\data\a`. Only where a path itself ends with a
    colon or comma and a number, write its weight, too.

    Args:
        text: The mixture.

    Returns:
        The weight of each path, in their order; the weights are exact and add up to 1.

    Raises:
        ValueError: There is no entry, a path occurs twice, some entries have a weight and others do
            not, or a weight is not positive.

    Example:
        >>> weights = grain.sources.parse_mixture("web/*:0.3; C:/books@8:0.7")
        >>> {path: str(weight) for path, weight in weights.items()}
        {'web/*': '3/10', 'C:/books@8': '7/10'}
    """
    if not isinstance(text, str):
        raise TypeError(f"a mixture must be a text, got an object of type {type(text).__name__}")
    weights: dict[str, Fraction | None] = {}
    for entry in filter(None, map(str.strip, text.split(";"))):
        if mistaken := _MISTAKEN.fullmatch(entry):
            raise ValueError(
                f"the weight of {_text(entry)} must be a positive number, got {mistaken[1]}"
            )
        match = _WEIGHTED.fullmatch(entry)
        path = match["path"] if match else entry
        weight = Fraction(match["weight"]) if match else None
        if weight is not None and weight <= 0:
            raise ValueError(f"the weight of {_text(path)} must be positive, got {weight}")
        if path in weights:
            raise ValueError(
                f"{_text(path)} occurs twice in the mixture {_text(text)}; add up its weights"
            )
        weights[path] = weight
    if not weights:
        raise ValueError(
            f"the mixture {_text(text)} has no entry; expected `path:weight;path:weight`"
        )
    without = [path for path, weight in weights.items() if weight is None]
    if without and len(without) < len(weights):
        raise ValueError(
            f"the mixture {_text(text)} has no weight for {_text(without[0])}; give one for each "
            "path, or for none"
        )
    chosen = {path: Fraction(1) if weight is None else weight for path, weight in weights.items()}
    total = sum(chosen.values())
    return {path: weight / total for path, weight in chosen.items()}


def mix_from_text(
    text: str, make_dataset: Callable[[str], AnyDataset], *, exact: bool = True
) -> AnyDataset:
    """Mixes the datasets of a text such as `"a/*:0.3;b/*:0.7"`.

    See `parse_mixture` for the text. Where `make_dataset` returns an `IterDataset`, the state of
    the mixture has those of the datasets by path, and datasets take turns in the order of paths, as
    with `IterDataset.mix` of a mapping.

    Args:
        text: The mixture.
        make_dataset: A function of a path, as written in `text`; all its results are `MapDataset`s,
            or all are `IterDataset`s.
        exact: Whether proportions are exactly those of the weights. Otherwise they are rounded as
            by `MapDataset.mix` and Grain, so that 0.3 and 0.7 become 100 and 233.

    Returns:
        The mixture: a `MapDataset`, or an `IterDataset` if `make_dataset` returns such.

    Raises:
        ValueError: The text is not a mixture, a dataset is empty, or the weights have so many
            digits that exact proportions do not fit into 62 bits.
        TypeError: `make_dataset` returns something else, or datasets of both kinds.

    Example:
        >>> parts = {"a": grain.MapDataset.range(3), "b": grain.MapDataset.range(10, 17)}
        >>> list(grain.sources.mix_from_text("a:0.3;b:0.7", parts.get))
        [0, 10, 11, 1, 12, 13, 2, 14, 15, 16]
    """
    weights = parse_mixture(text)
    datasets: dict[str, Any] = {path: make_dataset(path) for path in weights}
    kinds = {path: _kind(path, dataset) for path, dataset in datasets.items()}
    if len(set(kinds.values())) > 1:
        raise TypeError(
            "`make_dataset` must return datasets of one kind, got "
            + ", ".join(f"{kind.__name__} for {_text(path)}" for path, kind in kinds.items())
        )
    mixed: Any
    if MapDataset in kinds.values():
        floats = [float(weight) for weight in weights.values()]
        node = random_access.Mix.of(nodes_of(datasets.values()), floats)
        if exact:
            proportions = _proportions(text, list(weights.values()))
            node = dataclasses.replace(node, proportions=proportions)
        mixed = PlannedMapDataset(node)
    else:
        # The names are in states.
        of_name = {identified(path): path for path in weights}
        if len(of_name) < len(weights):
            raise ValueError(
                f"the mixture {_text(text)} has several paths that differ only in the query of "
                "their URL; mix their datasets by `IterDataset.mix`"
            )
        named = {name: node_of(datasets[path]) for name, path in of_name.items()}
        mix = Mix.of(named, {name: float(weights[path]) for name, path in of_name.items()})
        names = [of_name[name] for name in mix.names or ()]
        if exact:
            proportions = _proportions(text, [weights[path] for path in names])
            mix = dataclasses.replace(mix, proportions=proportions)
        mixed = PlannedIterDataset(mix, [datasets[path] for path in names])
    return mixed  # type: ignore[no-any-return]


def _text(text: str) -> str:
    """A path, or a mixture, for messages."""
    return repr(";".join([shown(path.strip()) for path in text.split(";")]))


def _kind(path: str, dataset: Any) -> type:
    for kind in (MapDataset, IterDataset):
        if isinstance(dataset, kind):
            return kind
    raise TypeError(
        "`make_dataset` must return a `MapDataset` or an `IterDataset`, got "
        f"{dataset!r} for {_text(path)}"
    )


def _proportions(text: str, weights: list[Fraction]) -> tuple[int, ...]:
    common = math.lcm(*(weight.denominator for weight in weights))
    if common >= _MAX_PROPORTION:
        raise ValueError(
            f"the weights of the mixture {_text(text)} have too many digits for exact proportions; "
            "pass `exact=False`, or give fewer"
        )
    return tuple(int(weight * common) for weight in weights)
