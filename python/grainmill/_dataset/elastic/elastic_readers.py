"""The ways to split a dataset among processes, so that another number of them can continue."""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, Any

from grainmill._dataset.iterator import PipelineDatasetIterator, iterator_over
from grainmill._interrupts import raise_interrupt
from grainmill._iterators import elastic_shards as plan
from grainmill._iterators.base.checked_state import CheckedState, integer, refusal
from grainmill._iterators.batch import Batch
from grainmill._iterators.interleave import InterleaveStage
from grainmill._iterators.open import open_stage
from grainmill._iterators.shard_states import EXHAUSTED, STATE, by_dataset, of_datasets
from grainmill._plan.slicing import check_sliceable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from grainmill._iterators.base.stage import Stage
    from grainmill._plan.multiprocessing_options import MultiprocessingOptions
    from grainmill._plan.node import Node
    from grainmill._plan.options import ReadOptions
    from grainmill._plan.sharding import ShardOptions

_NAME = "ElasticIterator"


class _Reader:
    """Opens the iterator over a process's elements when it is first needed."""

    size: int  # the global size of a batch
    next_index: int = 0  # the elements that all processes together have taken, if batches are full
    _iterator: PipelineDatasetIterator[Any] | None = None

    def iterator(self) -> PipelineDatasetIterator[Any]:
        """The iterator over this process's elements, opened where the state says."""
        last = self._iterator
        if last is None:
            self._iterator = last = self._opened()
        elif last._closed:  # noqa: SLF001 - by an iterator over a dataset derived from this one
            self._iterator = last = self._opened_after(last)
        return last

    def _opened_after(self, closed: PipelineDatasetIterator[Any]) -> PipelineDatasetIterator[Any]:
        """An iterator that continues where `closed` was."""
        iterator = self._opened()
        iterator.set_state(closed.get_state())
        return iterator

    def _opened(self) -> PipelineDatasetIterator[Any]:
        raise NotImplementedError

    def close(self) -> None:
        """Closes the iterator."""
        if self._iterator is not None:
            self._iterator.close()


class ByIndex(_Reader):
    """Reads every n-th element of a `MapDataset` from a global index on."""

    def __init__(
        self,
        ds: Any,
        global_batch_size: int,
        options: ShardOptions,
        read_options: ReadOptions,
        multiprocessing_options: MultiprocessingOptions | None,
    ) -> None:
        self._ds = ds
        self.size = global_batch_size
        self._options = options
        self._read_options = read_options
        self._multiprocessing_options = multiprocessing_options

    def _opened(self) -> PipelineDatasetIterator[Any]:
        count = self._options.shard_count
        start = self.next_index + self._options.shard_index
        rows = self._ds.slice(slice(start, None, count))
        batches = rows.batch(local_batch_size(self.size, count), drop_remainder=True)
        dataset = batches.to_iter_dataset(self._read_options)
        if self._multiprocessing_options is not None:
            dataset = dataset.mp_prefetch(self._multiprocessing_options)
        iterator: PipelineDatasetIterator[Any] = iter(dataset)
        return iterator

    def _opened_after(self, _: PipelineDatasetIterator[Any]) -> PipelineDatasetIterator[Any]:
        return self._opened()

    def state(self) -> dict[str, Any]:
        """See `ElasticIterator.get_state`."""
        return {_NEXT: self.next_index}

    def restore(self, state: dict[str, Any]) -> None:
        """See `ElasticIterator.set_state`."""
        saved = CheckedState(_NAME, state, (_NEXT,))
        index = integer(saved[_NEXT])
        if index is None:
            raise saved.refusal(f"`{_NEXT}`", "must be an integer", saved[_NEXT])
        self.close()
        self._iterator, self.next_index = None, index


_NEXT = "global_next_index"


class ByShard(_Reader):
    """Runs the shards of one process."""

    def __init__(
        self,
        node: Node,
        global_batch_size: int,
        options: ShardOptions,
        multiprocessing_options: MultiprocessingOptions | None = None,
    ) -> None:
        self.size = global_batch_size
        self._options = options
        check_sliceable(node, max(2, options.shard_count))
        self._shards = plan.Shards(node, max(0, global_batch_size), multiprocessing_options)

    @property
    def _numbers(self) -> range:
        """The shards of this process."""
        count = self._shards.count
        return range(self._options.shard_index, count, self._options.shard_count)

    def _opened(self) -> PipelineDatasetIterator[Any]:
        local_batch_size(self.size, self._options.shard_count)  # the plainer error first
        if not self._numbers:
            raise IndexError(
                f"shard_index {self._options.shard_index} of {self._options.shard_count} has no "
                f"elements: the dataset has {self._shards.count} shards, which is the largest "
                "number of processes"
            )
        return _opened(self._shards.of_process(self._numbers), self.size, self._options)

    def state(self) -> dict[str, Any]:
        """See `ElasticIterator.get_state`."""
        state = self.iterator().get_state()
        return {**self._identity(), "shards": state} if self._shards.by_rows else state

    def _identity(self) -> dict[str, int]:
        """What a state of rows belongs to; other states show it by their form."""
        options = self._options
        return {
            "shard_index": options.shard_index,
            "shard_count": options.shard_count,
            "num_shards": self._shards.count,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """See `ElasticIterator.set_state`."""
        if self._shards.by_rows:
            identity = self._identity()
            saved = CheckedState(_NAME, state, (*identity, "shards"))
            for key, expected in identity.items():
                if integer(saved[key]) != expected:
                    raise saved.refusal(
                        f"`{key}`",
                        f"must be {expected}; `set_shard_states` takes the states of other "
                        "numbers of processes",
                        saved[key],
                    )
            state = saved["shards"]
        self.iterator().set_state(state)

    def shard_states(self) -> dict[int, dict[str, Any]]:
        """See `ElasticIterator.get_shard_states`."""
        iterator, numbers = self.iterator(), self._numbers
        states = self._interleave(iterator).shard_states(iterator.get_state())
        groups = self._shards.num_groups(numbers)
        found: dict[int, dict[str, Any]] = {}
        for group in range(groups):
            own = numbers[group::groups]
            of_group = by_dataset(states[group][STATE], len(own), self._start_state(own))
            found |= zip(own, of_group, strict=True)
        return found if groups else dict(zip(numbers, states, strict=True))

    def restore_shards(self, states: Mapping[Any, dict[str, Any]]) -> None:
        """See `ElasticIterator.set_shard_states`."""
        iterator, numbers = self.iterator(), self._numbers
        own = _own_states(states, numbers, range(self._shards.count))
        groups = self._shards.num_groups(numbers)
        if groups:
            size = len(numbers) // groups
            of_groups = [of_datasets(own[group::groups], size, _NAME) for group in range(groups)]
            own = [{EXHAUSTED: 0, STATE: state} for state in of_groups]
        iterator.set_state(self._interleave(iterator).state_of_shards(own))

    def _start_state(self, numbers: range) -> Callable[[int], dict[str, Any]]:
        """Returns the state at the start of the shard `numbers[index]`."""

        def start_state(index: int) -> dict[str, Any]:
            with contextlib.closing(open_stage(self._shards.plan(numbers[index]))) as stage:
                return stage.state()

        return start_state

    @staticmethod
    def _interleave(iterator: PipelineDatasetIterator[Any]) -> InterleaveStage:
        stage: Stage = iterator._stage  # noqa: SLF001 - states of shards are states of the stage
        while not isinstance(stage, InterleaveStage):
            (stage,) = stage.parents
        return stage


class ByUsersShards(_Reader):
    """Runs the share of a user's own dataset, whose iterator has the states of its shards."""

    def __init__(
        self, node: Node, dataset: _Recorded, global_batch_size: int, options: ShardOptions
    ) -> None:
        self._node = node
        self._dataset = dataset
        self.size = global_batch_size
        self._options = options

    def _opened(self) -> PipelineDatasetIterator[Any]:
        return _opened(self._node, self.size, self._options)

    def state(self) -> dict[str, Any]:
        """See `ElasticIterator.get_state`."""
        return self.iterator().get_state()

    def restore(self, state: dict[str, Any]) -> None:
        """See `ElasticIterator.set_state`."""
        self.iterator().set_state(state)

    def shard_states(self) -> dict[int, dict[str, Any]]:
        """See `ElasticIterator.get_shard_states`."""
        self.restore(self.state())  # its iterator may be ahead, after an error
        first, step = self._options.shard_index, self._options.shard_count
        return {
            first + step * index: state for index, state in enumerate(self._dataset.shard_states())
        }

    def restore_shards(self, states: Mapping[Any, dict[str, Any]]) -> None:
        """See `ElasticIterator.set_shard_states`."""
        iterator = self.iterator()
        first, step = self._options.shard_index, self._options.shard_count
        numbers = range(first, first + step * len(self._dataset.shard_states()), step)
        every = range(1 + max((_shard_number(state) for state in states), default=-1))
        own = _own_states(states, numbers, every if every[first::step] == numbers else numbers)
        before = self.state()
        try:
            self._dataset.iterator.set_shard_states(own)
            after = self._dataset.iterator.get_state()
        except Exception as failure:
            raise_interrupt(failure)
            self.restore(before)
            raise
        iterator.set_state(after)


class _Recorded:
    """A user's own dataset, and the iterator over it that was made last."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.iterator: Any = None

    @property
    def has_shard_states(self) -> bool:
        """Whether its iterators have the two methods."""
        iterator = iter(self._dataset)
        found = all(hasattr(iterator, name) for name in ("get_shard_states", "set_shard_states"))
        if hasattr(iterator, "close"):
            iterator.close()
        return found

    def __iter__(self) -> Any:
        self.iterator = iter(self._dataset)
        return self.iterator

    def shard_states(self) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = self.iterator.get_shard_states()
        return states


def by_users_shards(node: Node, size: int, options: ShardOptions) -> ByUsersShards | None:
    """Reads a dataset of the user's whose iterators have the states of its shards, if it is one."""
    unit = plan.sliced_by_user(node)
    if unit is None:
        return None
    dataset = copy.deepcopy(unit.dataset)
    dataset.set_slice(slice(options.shard_index, None, options.shard_count), False)  # noqa: FBT003 - the protocol
    recorded = _Recorded(dataset)
    return (
        ByUsersShards(plan.with_dataset(node, unit, recorded), recorded, size, options)
        if recorded.has_shard_states
        else None
    )


def local_batch_size(global_batch_size: int, count: int) -> int:
    """The size of a batch of one of `count` processes; not positive if the argument is not.

    Raises:
        ValueError: `count` does not divide it.
    """
    size, rest = divmod(global_batch_size, count)
    if rest and global_batch_size > 0:
        raise ValueError(
            f"Global batch size {global_batch_size} is not divisible by shard count {count}."
        )
    return min(global_batch_size, size)


def _opened(
    node: Node, global_batch_size: int, options: ShardOptions
) -> PipelineDatasetIterator[Any]:
    """The iterator over the elements of one process, in batches unless these have no size."""
    size = local_batch_size(global_batch_size, options.shard_count)
    if size > 0:
        node = Batch.after(node, size, drop_remainder=False)
    return iterator_over(node)


def _own_states(states: Mapping[Any, Any], own: range, every: range) -> list[Any]:
    """The states of a process's shards, out of `states` of these or of all.

    Raises:
        ValueError: Shards are missing, or unknown.
    """
    numbered = {_shard_number(key): state for key, state in states.items()}
    if set(numbered) != set(own) and set(numbered) != set(every):
        missing = sorted(set(own) - set(numbered)) or sorted(set(every) - set(numbered))
        raise refusal(
            _NAME,
            "shard states",
            f"must be those of the shards {[*own]}, or of all {len(every)}; missing {missing}, "
            f"unknown {sorted(set(numbered) - set(every))}",
            sorted(numbered),
        )
    return [numbered[number] for number in own]


def _shard_number(key: Any) -> int:
    number = int(key) if isinstance(key, str) and key.isdecimal() else integer(key)
    if number is None:
        raise refusal(_NAME, "shard states", "must have numbers of shards as keys", key)
    return number
