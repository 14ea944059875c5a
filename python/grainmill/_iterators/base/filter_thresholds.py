"""Warnings and errors for filters that drop almost all elements."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grainmill._plan.options import DatasetOptions

_WINDOW = 1000
_WARN_INTERVAL_S = 60.0


class DropWatch:
    """Counts dropped elements in windows of 1000, then warns or raises as the options say.

    Attributes:
        left: How many elements are missing until the window is full.
        dropped: How many of its elements were dropped.
        excess: The error to raise when the next element is requested, if a window reached the
            threshold for raising.
    """

    __slots__ = (
        "_last_warning",
        "_name",
        "_raise_ratio",
        "_warn_ratio",
        "dropped",
        "excess",
        "left",
    )

    def __init__(self, name: str, options: DatasetOptions) -> None:
        self._name = name
        self._warn_ratio = options.filter_warn_threshold_ratio
        self._raise_ratio = options.filter_raise_threshold_ratio
        self._last_warning = float("-inf")
        self.left = _WINDOW
        self.dropped = 0
        self.excess: ValueError | None = None

    def record_kept(self, count: int) -> None:
        """Records `count` elements, none of which was dropped."""
        left = self.left - count
        if self.dropped and left <= 0:  # the window ends within these elements
            self.close_window()
            self.excess = None
        self.left = left if left > 0 else _WINDOW - (-left % _WINDOW)

    def first_excess(self, kept: Sequence[bool]) -> tuple[int, ValueError] | None:
        """Records for each element whether it was kept.

        Returns:
            If a window reached the threshold for raising: how many elements there are up to its
            last one, and the error. Later elements are not recorded.
        """
        for index, keep in enumerate(kept):
            self.left -= 1
            self.dropped += not keep
            if not self.left:
                self.close_window()
                error, self.excess = self.excess, None
                if error is not None:
                    return index + 1, error
        return None

    def raise_excess(self) -> None:
        """Raises `excess`, once."""
        error, self.excess = self.excess, None
        if error is not None:
            raise error

    def close_window(self) -> None:
        """Compares a full window with the thresholds, and starts the next one."""
        ratio = self.dropped / _WINDOW
        self.left, self.dropped = _WINDOW, 0
        message = (
            f"Transformation {self._name} skipped {ratio * 100:.2f} % of the last seen {_WINDOW} "
            "elements. Please check that the filter is meant to be so strict; thresholds are set "
            "with `DatasetOptions`."
        )
        if self._raise_ratio and ratio >= self._raise_ratio:
            self.excess = ValueError(message)
            return
        now = time.monotonic()
        if (
            self._warn_ratio
            and ratio >= self._warn_ratio
            and now - self._last_warning >= _WARN_INTERVAL_S
        ):
            self._last_warning = now
            logging.getLogger("grainmill").warning(message)
