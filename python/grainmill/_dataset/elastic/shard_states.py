"""Iterators that also save and restore the states of single datasets or workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

from grainmill._dataset.iterator import PipelineDatasetIterator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grainmill._iterators.interleave import InterleaveStage

T_co = TypeVar("T_co", covariant=True)


class InterleaveDatasetIterator(PipelineDatasetIterator[T_co]):
    """Runs a plan that ends with an interleave, or with workers that share the elements."""

    def get_shard_states(self) -> list[dict[str, Any]]:
        """Returns the state of each dataset, or of each worker, after the element last returned.

        Returns:
            Dicts `{"exhausted": 0 or 1, "state": ...}` in the order of the datasets. A dataset that
            ended and was replaced by another has its state at the start.
        """
        state = self.get_state()
        return self._interleave.shard_states(state)

    def set_shard_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Continues each dataset, or worker, at its state; the first that is left has the turn.

        Args:
            states: From `get_shard_states`, one for each dataset.

        Raises:
            ValueError: There is another number of states, or one does not fit its dataset.
        """
        self.set_state(self._interleave.state_of_shards(states))

    @property
    def _interleave(self) -> InterleaveStage:
        return cast("InterleaveStage", self._stage)
