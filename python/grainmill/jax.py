"""Transfers batches to JAX devices in advance."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Protocol

import jax

from grainmill._dataset.stages import ThreadPrefetchIterDataset
from grainmill._plan import transforms

if TYPE_CHECKING:
    from grainmill._dataset.element_types import AnyDataset
    from grainmill._dataset.iter_dataset import IterDataset

__all__ = ["device_put", "process_index_and_count"]


class Device(Protocol):
    """The attributes of a `jax.Device`, a class unknown to pyright."""

    @property
    def platform(self) -> str:
        """The kind of device, such as `gpu`."""

    @property
    def process_index(self) -> int:
        """The process that the device belongs to."""


def process_index_and_count() -> tuple[int, int]:
    """Returns the index of this JAX process, from 0, and the number of processes."""
    return jax.process_index(), jax.process_count()


def device_put(
    ds: AnyDataset[Any],
    device: Device | jax.sharding.Sharding,
    *,
    cpu_buffer_size: int = 4,
    device_buffer_size: int = 2,
) -> IterDataset[Any]:
    """Prefetches elements and transfers their arrays to a device, or the devices of a sharding.

    Leaves become `jax.Array`s of the same shape; dtypes are those that `jax.device_put` chooses
    (int64 becomes int32 unless 64-bit types are enabled). One thread computes elements, a second
    one starts their transfers; the two sizes limit the numbers of elements they hold, and both end
    when the iterator is closed. A state is that of `ds` after the element delivered last; transfers
    in flight are not part of it.

    If a sharding spans several processes, the arrays of `ds` are this process's shards of global
    arrays (`jax.make_array_from_process_local_data`). On CPU, JAX may use the memory of a batch
    instead of copying it; that memory is not reused while JAX refers to it.

    Args:
        ds: A dataset whose elements have arrays or numbers as leaves; JAX rejects others.
        device: A device, or a sharding that fits every leaf.
        cpu_buffer_size: Maximum number of prefetched elements in host memory; 0 uses no thread.
        device_buffer_size: Maximum number of elements whose transfer has started; 0 transfers each
            when it is requested.

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
    # These three nodes must stay: derived seeds depend on the number of nodes.
    on_host = ThreadPrefetchIterDataset(ds, prefetch_buffer_size=cpu_buffer_size)
    return ThreadPrefetchIterDataset(
        on_host.map(DevicePut(device)), prefetch_buffer_size=device_buffer_size
    )


@dataclasses.dataclass(frozen=True)
class DevicePut(transforms.Map):
    """Starts the transfer of one element to a device, without waiting for it.

    Attributes:
        device: A device, or a sharding that fits every leaf.
    """

    device: Device | jax.sharding.Sharding

    def map(self, element: Any) -> Any:
        """Returns the element with JAX arrays as leaves.

        Args:
            element: An element whose leaves are arrays or numbers.
        """
        if isinstance(self.device, jax.sharding.Sharding) and not self.device.is_fully_addressable:
            as_global = functools.partial(jax.make_array_from_process_local_data, self.device)
            return jax.tree.map(as_global, element)
        return jax.device_put(element, self.device)
