# The engine of grainmill, compiled from Rust.

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Arena",
    "ArrayRecordWriter",
    "GrainmillError",
    "Slot",
    "copy_rows",
    "scalars_to_rows",
]

class GrainmillError(RuntimeError): ...

# batch

@final
class Arena:
    def __new__(cls, max_free_bytes: int = 1073741824, *, poison: bool | None = None) -> Arena: ...
    def slot(self, byte_len: int) -> Slot: ...
    def array(self, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]: ...
    @property
    def free_bytes(self) -> int: ...

@final
class Slot:
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def copy_rows(array: NDArray[Any], elements: list[Any], at: int) -> int: ...
def scalars_to_rows(elements: list[Any]) -> NDArray[Any] | None: ...

# records, writing

@final
class ArrayRecordWriter:
    def __new__(cls, path: str | bytes, options: str = "", **_kwargs: object) -> Self: ...
    def write(self, record: bytes, /) -> None: ...
    def close(self) -> None: ...
    def ok(self) -> bool: ...
    def is_open(self) -> bool: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
