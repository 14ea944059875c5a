"""Frozen dataclasses whose methods are generated when they are first needed.

Generating them takes longer than all else that importing a module with fifty classes does, and a
program uses a few of these.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, TypeVar, dataclass_transform

AnyClass = TypeVar("AnyClass", bound="type[Any]")

_lock = threading.RLock()


@dataclass_transform(
    eq_default=False, frozen_default=True, field_specifiers=(dataclasses.field,)
)  # what type checkers understand of it
def lazy_dataclass(cls: AnyClass) -> AnyClass:
    """Makes `cls` a frozen dataclass that compares by identity, once it is used as one.

    That is: when an object is created, or its fields are asked for, also by `dataclasses` for a
    derived class.
    """

    def __init__(self: Any, *args: Any, **named: Any) -> None:  # noqa: N807 - it is the method
        _generate(cls)
        self.__init__(*args, **named)

    cls.__init__ = __init__
    cls.__dataclass_fields__ = _Fields(cls)
    return cls


class _Fields:
    """Stands for the fields of a class until they are asked for."""

    def __init__(self, cls: type[Any]) -> None:
        self._cls = cls

    def __get__(self, instance: object, owner: type[Any]) -> dict[str, dataclasses.Field[Any]]:
        _generate(self._cls)
        fields: dict[str, dataclasses.Field[Any]] = owner.__dataclass_fields__
        return fields


def _generate(cls: type[Any]) -> None:
    with _lock:
        if not isinstance(vars(cls).get("__dataclass_fields__"), _Fields):
            return
        dataclasses.dataclass(init=False, frozen=True, eq=False, repr=False)(cls)
        # Replaced in one step: other threads may create objects meanwhile.
        alike = type(cls.__name__, (cls,), {"__doc__": cls.__doc__, "__module__": cls.__module__})
        alike = dataclasses.dataclass(frozen=True, eq=False, repr=False)(alike)
        cls.__init__ = vars(alike)["__init__"]
