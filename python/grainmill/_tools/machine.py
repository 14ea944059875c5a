"""What `grainmill doctor` finds out: versions, and what the machine lets this process use."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import platform
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grainmill import __version__, _native, files
from grainmill._memory import group_limits, lines_of, machine_bytes, usable_bytes
from grainmill._workers.limits import workers_are_processes

if TYPE_CHECKING:
    from collections.abc import Callable

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

REQUIRED = ("numpy", "cloudpickle")
# What each would give.
OPTIONAL = {
    "jax": "batches on devices",
    "orbax-checkpoint": "checkpoints of model and data",
    "pyarrow": "writing Parquet files",
    "datasets": "data sets of Hugging Face",
    "tokenizers": "`Tokenize` by a fast tokenizer",
    "apache-beam": "`grainmill.beam`",
    "ray": "`grainmill.ray`",
    "prometheus-client": "metrics by HTTP",
}
# Their versions explain a report.
OTHERS = ("jaxlib", "flax", "grain", "array-record", "tensorflow", "torch")
FEATURES = {
    "buckets": "`s3://`, `gs://`, `az://` and `https://`",
    "images": "`DecodeImage` and `DecodeRandomCrop`",
    "parquet": "Parquet files",
}
# None of them is a secret; all others stay where they are.
VARIABLES = (
    *("GRAINMILL_BUCKET_CACHE_BYTES", "GRAINMILL_BUCKET_DEADLINE_S", "GRAINMILL_BUCKET_STALL_S"),
    *("GRAINMILL_BUCKET_MAX_IN_FLIGHT", "GRAINMILL_BUCKET_MIN_BYTES_PER_S"),
    *("GRAINMILL_INDEX_BYTES", "GRAINMILL_MAX_PAGE_BYTES"),
    *("GRAINMILL_MAX_RECORD_BYTES", "GRAINMILL_RESTORE_ANYWAY", "GRAINMILL_WORKER_JAX_PLATFORMS"),
    *("JAX_PLATFORMS", "MALLOC_ARENA_MAX", "OMP_NUM_THREADS", "PYTHONDEVMODE", "PYTHONMALLOC"),
)
_QUOTA_FILES = {"cgroup2": ["cpu.max"], "cgroup": ["cpu.cfs_quota_us", "cpu.cfs_period_us"]}
_PIDS_FILES = {"cgroup2": ["pids.max"], "cgroup": ["pids.max"]}
_LIMITS = {
    "open files": "RLIMIT_NOFILE",
    "processes": "RLIMIT_NPROC",
    "locked bytes": "RLIMIT_MEMLOCK",
    "address space": "RLIMIT_AS",
}


def facts(root: str | Path = "") -> dict[str, Any]:
    """All facts, of what JSON has; `None` is what the system does not say, or no limit.

    Args:
        root: The directory with `proc` and the mounted file systems.
    """
    features = set(_native.features)
    installed = {name: _version(name) for name in (*REQUIRED, *OPTIONAL, *OTHERS)}
    return {
        "versions": {
            "grainmill": __version__,
            "profile": _native.profile,
            "features": sorted(features & FEATURES.keys()),
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "has_gil": getattr(sys, "_is_gil_enabled", lambda: True)(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "libc": " ".join(platform.libc_ver()).strip() or None,
            "packages": {name: text for name, text in installed.items() if text is not None},
        },
        "missing": {
            **{name: gives for name, gives in FEATURES.items() if name not in features},
            **{name: gives for name, gives in OPTIONAL.items() if installed[name] is None},
        },
        "cores": _cores(root),
        "memory": {
            "machine": machine_bytes(),
            "usable": usable_bytes(root),
            "available": _available_bytes(root),
        },
        "places": {
            "working directory": _place(os.path.realpath("."), root),
            "temporary files": _place(os.path.realpath(tempfile.gettempdir()), root),
            "/dev/shm": _place("/dev/shm", root),
        },
        "limits": {name: _limit(kind) for name, kind in _LIMITS.items()}
        | {"processes of the control group": _least(_PIDS_FILES, "pids", _number, root)},
        "processes": {
            "workers": _workers(),
            "start_method": multiprocessing.get_start_method(),
        },
        "environment": {
            name: files.redacted(os.environ[name]) for name in VARIABLES if name in os.environ
        },
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cores(root: str | Path) -> dict[str, Any]:
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "machine": os.cpu_count(),
        "affinity": len(affinity(0)) if affinity is not None else None,
        "quota": _least(_QUOTA_FILES, "cpu", _quota, root),
        "used": _native.num_cores(),
    }


def _least(
    names: dict[str, list[str]],
    controller: str,
    parse: Callable[[str], float | None],
    root: str | Path,
) -> float | None:
    """The lowest limit of the control groups; `None` where there is none."""
    found = map(parse, group_limits(controller, names, root))
    return min((limit for limit in found if limit is not None), default=None)


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _quota(text: str) -> float | None:
    """The cores of `QUOTA PERIOD`, in microseconds."""
    match [_number(part) for part in text.split()]:
        case [int(quota), int(period)] if quota and period:
            return quota / period
    return None  # "max", or -1


def _available_bytes(root: str | Path) -> int | None:
    for line in lines_of(f"{root}/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _place(path: str, root: str | Path) -> dict[str, Any] | None:
    """The file system of a directory: its kind, and its bytes; `None` where there is none."""
    try:
        room = os.statvfs(f"{root}{path}")
    except (OSError, AttributeError):  # Windows has none
        return None
    return {
        "kind": _kind(path, root),
        "bytes": room.f_blocks * room.f_frsize,
        "free": room.f_bavail * room.f_frsize,
    }


def _kind(path: str, root: str | Path) -> str | None:
    """The kind of the file system with this path, as the list of mounts has it."""
    kind, depth = None, -1
    for line in lines_of(f"{root}/proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        mount = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), before.split(" ")[4])
        within = Path(path).is_relative_to(mount)
        if within and len(Path(mount).parts) >= depth:  # a later one hides what was there
            kind, depth = after.split(" ", 1)[0], len(Path(mount).parts)
    return kind


def _limit(kind: str) -> list[int | None] | None:
    """The soft and the hard limit, `None` for no limit; `None` where the system has none."""
    if resource is None or not hasattr(resource, kind):
        return None
    limits = resource.getrlimit(getattr(resource, kind))
    return [None if limit == resource.RLIM_INFINITY else limit for limit in limits]


def _workers() -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report says it
        return "processes" if workers_are_processes() else "threads"
