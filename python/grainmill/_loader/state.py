"""CheckedState states of a loader: positions in the order of all shards, one for each worker."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from typing import Any

from grainmill._iterators.base.checked_state import CheckedState, integer

_VERSION = 2
_STAGE = "state of a `DataLoader`"


def to_bytes(state: dict[str, Any]) -> bytes:
    """Returns `state` as JSON."""
    return json.dumps(state, indent=4).encode()


def from_bytes(state: bytes) -> dict[str, Any]:
    """Parses a saved state.

    Raises:
        ValueError: `state` is not a JSON object.
    """
    try:
        parsed = json.loads(state)
    except (TypeError, ValueError) as failure:
        raise ValueError(
            f"{_STAGE} must be the bytes that `get_state` returned, got {str(state)[:100]!r} of "
            f"type {type(state).__name__}"
        ) from failure
    if not isinstance(parsed, dict):
        raise ValueError(f"{_STAGE} must be a JSON object, got {parsed!r}")
    return parsed


@dataclasses.dataclass(frozen=True)
class Numbering:
    """Converts the state of a loader's pipeline to that of the loader, and back.

    Worker `i` of this shard reads the positions `shard_index + (i + k * workers) * shard_count` of
    the order; the pipeline counts `k`, a saved state has the position of the last record read.
    """

    shard_index: int
    shard_count: int
    worker_count: int
    sampler: str
    data_source: str

    @property
    def _stride(self) -> int:
        """The distance between two consecutive positions of a worker."""
        return max(self.worker_count, 1) * self.shard_count

    def _last_seen(self, worker: int, num_read: int) -> int:
        first = self.shard_index + worker * self.shard_count
        return first + (num_read - 1) * self._stride

    def _num_read(self, worker: int, last_seen: int) -> int:
        first = self.shard_index + worker * self.shard_count
        passed, off = divmod(last_seen - first, self._stride)
        if off or passed < -1:
            raise ValueError(
                f"state has worker {worker} of {self.worker_count} at index {last_seen}, which is "
                f"not one of shard {self.shard_index} of {self.shard_count}; restore needs the "
                "same sharding"
            )
        return passed + 1

    def saved(self, state: dict[str, Any]) -> dict[str, Any]:
        """The loader's state for `state` of the pipeline."""
        worker_states = state["iterators_in_use_states"] if self.worker_count else [state]
        last_worker = state["next_index_in_cycle"] - 1 if self.worker_count else -1
        return {
            "version": _VERSION,
            _LAST_SEEN: {
                str(worker): self._last_seen(worker, worker_state["next_index"])
                for worker, worker_state in enumerate(worker_states)
            },
            "last_worker_index": last_worker,
            "worker_count": self.worker_count,
            "sampler": self.sampler,
            "data_source": self.data_source,
        }

    def own(self, saved: dict[str, Any], *, validate: bool = True) -> dict[str, Any]:
        """The pipeline's state for `saved` of the loader.

        Without `validate`, the sampler and the source may be others.

        Raises:
            ValueError: It was saved with another number of workers, another sampler or source.
        """
        checked = CheckedState("a `DataLoader`", saved, _NAMES)
        if saved["version"] != _VERSION:
            raise checked.refusal("`version`", f"must be {_VERSION}", saved["version"])
        self._check(saved, validate=validate)
        checked.index("worker_count")  # `_check` accepts `True` for 1
        workers = range(max(self.worker_count, 1))
        last_seen = saved[_LAST_SEEN]
        positions: list[int | None] = []
        if isinstance(last_seen, dict) and set(last_seen) == set(map(str, workers)):
            positions = [integer(last_seen[str(worker)]) for worker in workers]
        if not positions or None in positions:
            expected = f"must have an integer for each of the workers {list(map(str, workers))}"
            raise checked.refusal(f"`{_LAST_SEEN}`", expected, last_seen)
        next_worker = checked.index("last_worker_index", self.worker_count - 1, minimum=-1) + 1
        worker_states = [
            {"next_index": self._num_read(worker, position)}
            for worker, position in enumerate(positions)
            if position is not None
        ]
        if not self.worker_count:
            return worker_states[0]
        return {
            "next_index_in_cycle": next_worker % self.worker_count,
            "next_index_in_datasets": self.worker_count,
            "iterators_in_use_indices": list(workers),
            "iterators_in_use_states": worker_states,
            "exhausted": [0] * self.worker_count,
            "future_states": {},
        }

    def _continues(self, sampler: Any) -> bool:
        """Whether this sampler is the saved one, or has more epochs: each has an order of its own.

        So all positions of the saved one have the same records.
        """
        if sampler == self.sampler:
            return True
        if not isinstance(sampler, str) or not sampler.startswith("IndexSampler("):
            return False
        before, now = _EPOCHS.search(sampler), _EPOCHS.search(self.sampler)
        if (
            before is None
            or now is None
            or _EPOCHS.sub("", sampler) != _EPOCHS.sub("", self.sampler)
        ):
            return False
        if before[1] == "None" or (now[1] != "None" and int(now[1]) < int(before[1])):
            return False
        _LOG.warning(
            "the state of a `DataLoader` was saved with num_epochs=%s, and continues with "
            "num_epochs=%s",
            before[1],
            now[1],
        )
        return True

    def _check(self, saved: dict[str, Any], *, validate: bool) -> None:
        if saved["worker_count"] != self.worker_count:
            raise ValueError(
                "Worker count in checkpoint does not match dataloader worker count.\n"
                f"worker count in checkpoint: {saved['worker_count']}\n"
                f"worker count in dataloader: {self.worker_count}"
            )
        if validate and not self._continues(saved["sampler"]):
            raise ValueError(
                "Sampler in checkpoint does not match dataloader sampler.\n"
                f"sampler in checkpoint: {saved['sampler']}\n"
                f"sampler in dataloader: {self.sampler}\n"
                "`repr(sampler)` is what is compared, so a sampler of your own may need a "
                "`__repr__`."
            )
        if validate and saved["data_source"] != self.data_source:
            raise ValueError(
                "DataSource in checkpoint does not match datasource in dataloader.\n"
                f"data source in checkpoint: {saved['data_source']}\n"
                f"data source in dataloader: {self.data_source}\n"
                "`repr(data_source)` is what is compared, so a source of your own may need a "
                "`__repr__`."
            )


_LOG = logging.getLogger("grainmill")
_EPOCHS = re.compile(r", num_epochs=(\d+|None)")
_LAST_SEEN = "last_seen_indices"
_NAMES = ("version", _LAST_SEEN, "last_worker_index", "worker_count", "sampler", "data_source")
