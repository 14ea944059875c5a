"""Batches onto JAX devices ahead of use."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Protocol

import jax

from grainmill._dataset.stages import ThreadPrefetchIterDataset
from grainmill._plan import transforms

if TYPE_CHECKING:
    from grainmill._dataset.iter_dataset import IterDataset

__all__ = ["device_put", "process_place"]


class Device(Protocol):
    """What a `jax.Device` has; pyright does not know that class."""

    @property
    def platform(self) -> str:
        """What kind of device it is."""

    @property
    def process_index(self) -> int:
        """The process whose device it is."""


def process_place() -> tuple[int, int]:
    """Returns which of the processes that JAX runs on this is, from 0, and how many there are."""
    return jax.process_index(), jax.process_count()


def device_put(
    ds: IterDataset[Any],
    device: Device | jax.sharding.Sharding,
    *,
    cpu_buffer_size: int = 4,
    device_buffer_size: int = 2,
) -> IterDataset[Any]:
    """Puts the arrays of each element on a device, or on those of a sharding, ahead of use.

    Leaves become `jax.Array`s of the same shape; dtypes are those that `jax.device_put` chooses
    (int64 becomes int32 unless 64-bit types are enabled). One thread computes elements, a second
    one starts their transfers; what they hold is bounded by the two sizes, and both end when the
    iterator is closed. A state is that of `ds` after the element delivered last, so transfers under
    way are not part of it.

    Where a sharding spans several processes, the arrays of `ds` are this process's part of global
    arrays (`jax.make_array_from_process_local_data`). On CPU, JAX may use the memory of a batch
    instead of copying it; that memory is not used again while JAX holds it.

    Args:
        ds: Elements whose leaves are arrays or numbers; anything else JAX refuses.
        device: A device, or a sharding that fits every leaf.
        cpu_buffer_size: The most elements ready in host memory; 0 computes them without a thread.
        device_buffer_size: The most elements whose transfer has begun; 0 transfers when asked.

    Raises:
        ValueError: A size is negative.
        TypeError: A buffer size is not an integer.

    Example:
        >>> import jax
        >>> ds = grain.MapDataset.range(4).batch(2).to_iter_dataset()
        >>> ds = grain.experimental.device_put(ds, jax.devices()[0])
        >>> [batch.tolist() for batch in ds]
        [[0, 1], [2, 3]]
    """
    # Three nodes, since seeds that are derived from a dataset's depth count them.
    ready = ThreadPrefetchIterDataset(ds, prefetch_buffer_size=cpu_buffer_size)
    return ThreadPrefetchIterDataset(
        ready.map(DevicePut(device)), prefetch_buffer_size=device_buffer_size
    )


@dataclasses.dataclass(frozen=True)
class DevicePut(transforms.Map):
    """Starts the transfer of one element to a device, without waiting for its end.

    Attributes:
        device: A device, or a sharding that fits every leaf.
    """

    device: Device | jax.sharding.Sharding

    def map(self, element: Any) -> Any:
        """Returns the element with JAX arrays for leaves.

        Args:
            element: Its leaves are arrays or numbers.
        """
        if isinstance(self.device, jax.sharding.Sharding) and not self.device.is_fully_addressable:
            as_global = functools.partial(jax.make_array_from_process_local_data, self.device)
            return jax.tree.map(as_global, element)
        return jax.device_put(element, self.device)
