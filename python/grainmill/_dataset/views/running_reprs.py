"""How running iterators, also those of loaders, show themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grainmill._dataset.views.running import Table


class ShownRunning:
    """What shows where an iterator is, and the times of its stages.

    What draws them is imported when it is asked for.
    """

    def _shown_iterator(self) -> tuple[Any, str]:
        """The iterator over a plan, and what is shown as its name."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """One line: the name, how many elements were delivered, and how fast."""
        from grainmill._dataset.views.running import line_of  # noqa: PLC0415

        return line_of(*self._shown_iterator())

    def _running_table(self) -> Table | None:
        """The stages with their times; `None` if there is no plan."""
        from grainmill._dataset.views.running import table_of  # noqa: PLC0415

        return table_of(*self._shown_iterator())

    def _repr_html_(self) -> str | None:
        """The table with bars; notebooks call this."""
        from grainmill._dataset.views.running import html_of  # noqa: PLC0415

        table = self._running_table()
        return None if table is None else html_of(table)
