"""A watch over filters that turn down almost everything."""

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
    """Counts dropped elements in windows of 1000, then warns or raises as the options say."""

    def __init__(self, name: str, options: DatasetOptions) -> None:
        self._name = name
        self._warn_ratio = options.filter_warn_threshold_ratio
        self._raise_ratio = options.filter_raise_threshold_ratio
        self._seen = self._dropped = 0
        self._last_warning = float("-inf")

    def kept_only(self, count: int) -> None:
        """Takes note of `count` elements of which none was dropped."""
        seen = self._seen + count
        if self._dropped and seen >= _WINDOW:  # a window that ends among kept elements
            self._close_window()
        self._seen = seen % _WINDOW

    def first_excess(self, kept: Sequence[bool]) -> tuple[int, ValueError] | None:
        """Takes note of a verdict on each element.

        Returns:
            If a window reached the threshold for raising: how many of the elements stand up to
            and including its last one, and the error. Later elements are not counted.
        """
        for place, keep in enumerate(kept):
            self._seen += 1
            self._dropped += not keep
            if self._seen == _WINDOW:
                error = self._close_window()
                if error is not None:
                    return place + 1, error
        return None

    def _close_window(self) -> ValueError | None:
        ratio = self._dropped / _WINDOW
        self._seen = self._dropped = 0
        message = (
            f"Transformation {self._name} skipped {ratio * 100:.2f} % of the last seen {_WINDOW} "
            "elements. Please check that the filter is meant to be so strict; thresholds are set "
            "with `DatasetOptions`."
        )
        if self._raise_ratio and ratio >= self._raise_ratio:
            return ValueError(message)
        now = time.monotonic()
        if (
            self._warn_ratio
            and ratio >= self._warn_ratio
            and now - self._last_warning >= _WARN_INTERVAL_S
        ):
            self._last_warning = now
            logging.getLogger("grainmill").warning(message)
        return None
