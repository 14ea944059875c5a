"""Keeps JAX in worker processes away from accelerators, which belong to the main process.

An accelerator serves one process, or its memory is taken by the first computation. Nothing here
imports JAX: what JAX reads when it is imported is prepared, and what it has read is corrected.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import ModuleType

WORKER_PLATFORMS = "GRAINMILL_WORKER_JAX_PLATFORMS"
"""The environment variable with the value of `JAX_PLATFORMS` in workers; empty to inherit it."""

_JAX_PLATFORMS = "JAX_PLATFORMS"
_DISTRIBUTED = "jax.distributed"
_LOGGER = logging.getLogger("grainmill")


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of workers, given that of the main process: JAX uses the CPU there."""
    platforms = environment.get(WORKER_PLATFORMS, "cpu")
    return {**environment, **({_JAX_PLATFORMS: platforms} if platforms else {})}


def restrict_jax() -> None:
    """Applies this process's environment to a JAX that may be imported already or later."""
    _update_platforms()  # an interpreter may import JAX at its start
    if _DISTRIBUTED in sys.modules:
        _disable_initialize(sys.modules[_DISTRIBUTED])
    else:
        sys.meta_path.insert(0, _DistributedFinder())


def _update_platforms() -> None:
    jax = sys.modules.get("jax")
    platforms = os.environ.get(_JAX_PLATFORMS)
    if jax is not None and platforms is not None:
        jax.config.update("jax_platforms", platforms)


@contextlib.contextmanager
def platforms_may_change() -> Iterator[None]:
    """Lets user code choose platforms by the environment, though its modules have imported JAX."""
    before = os.environ.get(_JAX_PLATFORMS)
    yield
    if os.environ.get(_JAX_PLATFORMS) != before:
        _update_platforms()


def _disable_initialize(distributed: ModuleType) -> None:
    distributed.initialize = _ignored_initialize  # type: ignore[attr-defined]


def _ignored_initialize(*_: Any, **__: Any) -> None:
    _LOGGER.warning(
        "`jax.distributed.initialize` is ignored in a worker process: the main process is a member "
        "of the job already. To keep workers from calling it, call it in the main script only"
    )


class _DistributedFinder(importlib.abc.MetaPathFinder):
    """Replaces `jax.distributed.initialize` when that module is imported, and then does nothing.

    A second process with the same number would end the job or wait for ever. Workers do not run the
    main script, but they import the user's modules, which may call it at their top.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _DISTRIBUTED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _DisablingLoader(spec.loader)
        return spec


class _DisablingLoader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _disable_initialize(module)
