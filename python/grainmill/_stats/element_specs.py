"""Describes an element as text: dtypes and shapes, in the structure of the element."""

from __future__ import annotations

import dataclasses
import pprint
from collections.abc import Mapping
from typing import Any

import numpy as np

from grainmill._interrupts import raise_interrupt


def spec_of(element: Any) -> Any:  # noqa: PLR0911 - one for each kind of element
    """The spec of an element: its structure with a text for each leaf, as Grain prints it."""
    if element is None:
        return None
    if isinstance(element, Mapping):
        return {key: spec_of(value) for key, value in element.items()}
    if isinstance(element, list | tuple) and not hasattr(element, "_fields"):
        return _sequence_spec(element)
    if hasattr(element, "_fields"):
        return type(element)(*[spec_of(item) for item in element])
    if dataclasses.is_dataclass(element) and not isinstance(element, type):
        fields = {
            field.name: spec_of(getattr(element, field.name))
            for field in dataclasses.fields(element)
        }
        return f"{type(element).__name__}\n{pprint.pformat(fields)}[]"
    if isinstance(element, np.ndarray):
        return f"{element.dtype}{list(element.shape)}"
    dtype, shape = getattr(element, "dtype", None), getattr(element, "shape", None)
    if dtype is not None and shape is not None and not isinstance(element, np.generic):
        return f"{dtype}{list(shape)}"
    return f"{type(element).__name__}[]"


class SpecText(str):
    """A spec that another process has printed, since its types may be known there only."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _sequence_spec(element: list[Any] | tuple[Any, ...]) -> Any:
    kinds = {type(item) for item in element}
    if len(kinds) > 1:
        return type(element)([spec_of(item) for item in element])
    name = type(element).__name__
    item = kinds.pop().__name__ if kinds else ""
    return f"{name}<{item}>{_shape_of(element)}"


def _shape_of(element: list[Any] | tuple[Any, ...]) -> str:
    try:
        return str(list(np.shape(element)))
    except ValueError as failure:  # ragged
        raise_interrupt(failure)
        return "[unknown shape]"
