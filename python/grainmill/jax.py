"""Transfers batches to JAX devices in advance."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import jax
import numpy as np

from grainmill._plan import transforms
from grainmill._stages import ThreadPrefetchIterDataset

if TYPE_CHECKING:
    from grainmill._dataset.element_types import AnyDataset
    from grainmill._dataset.iter_dataset import IterDataset

__all__ = ["device_put", "process_index_and_count"]


def __dir__() -> list[str]:
    return sorted(__all__)


class Device(Protocol):
    """The attributes of a `jax.Device`, a class unknown to pyright."""

    @property
    def platform(self) -> str:
        """The kind of device, such as `gpu`."""

    @property
    def process_index(self) -> int:
        """The process that the device belongs to."""


# Containers stand for pytrees; `None` is the default device.
Placement = Device | jax.sharding.Sharding | Mapping[Any, Any] | list[Any] | tuple[Any, ...] | None


def process_index_and_count() -> tuple[int, int]:
    """Returns the index of this JAX process, from 0, and the number of processes."""
    return jax.process_index(), jax.process_count()


def device_put(
    ds: AnyDataset[Any],
    device: Placement,
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

    Arrays of an element may differ in rank, and elements in shape. Where a sharding does not fit
    all leaves, such as one over two axes for a batch with a one-dimensional leaf, pass a pytree of
    shardings. The size of a divided axis must be a multiple of the number of parts, so drop the
    remainder of an epoch or pad it.

    If a sharding spans several processes, the arrays of `ds` are this process's shards of global
    arrays (`jax.make_array_from_process_local_data`). On CPU, JAX may use the memory of a batch
    instead of copying it; that memory is not reused while JAX refers to it.

    Args:
        ds: A dataset whose elements have arrays or numbers as leaves; JAX rejects others.
        device: A device, a sharding that fits every leaf, or a pytree of them: with the structure
            of an element, or of its upper levels, as in `jax.device_put`.
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

        A sharding for each array:

        >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec
        >>> mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
        >>> shardings = {
        ...     "tokens": NamedSharding(mesh, PartitionSpec("data", "model")),
        ...     "weight": NamedSharding(mesh, PartitionSpec("data")),
        ... }
        >>> ds = grain.MapDataset.source([{"tokens": np.zeros(8), "weight": 0.5}] * 4)
        >>> ds = grain.experimental.device_put(ds.batch(2).to_iter_dataset(), shardings)
        >>> {name: array.shape for name, array in next(iter(ds)).items()}
        {'tokens': (2, 8), 'weight': (2,)}
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
        device: A device, a sharding that fits every leaf, or a pytree of them.
    """

    device: Placement

    _advice_if_slow: ClassVar[str] = (
        "it waits for the transfer: send fewer bytes (`uint8` and not floats, `int32` and not "
        "`int64`), in fewer arrays"
    )

    def map(self, element: Any) -> Any:
        """Returns the element with JAX arrays as leaves.

        Args:
            element: An element whose leaves are arrays or numbers.
        """
        if not any(_spans_processes(leaf) for leaf in jax.tree.leaves(self.device)):
            return jax.device_put(element, self.device)
        return jax.tree.map(_placed, self.device, element)


def _spans_processes(device: object) -> bool:
    return isinstance(device, jax.sharding.Sharding) and not device.is_fully_addressable


def _placed(device: Any, element: Any) -> Any:
    """`element`, all of whose leaves go to `device`."""
    if not _spans_processes(device):
        return jax.device_put(element, device)
    as_global = functools.partial(jax.make_array_from_process_local_data, device)
    return jax.tree.map(lambda leaf: as_global(np.asarray(leaf)), element)
