"""`grainmill doctor`: versions, what the machine lets this process use, and what of it matters."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

from grainmill._tools.console import ExitCode, byte_text, print_json, table
from grainmill._tools.machine import FEATURES, facts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

_WIDTH = 88
_FEW_FILES = 4096  # of many data sets, with buckets and workers
_SMALL_MEMORY = 2 << 30
_SMALL_DISK = 1 << 30
_SMALL_SHM = 256 << 20
# Each worker is a process; its threads, and those of JAX and NumPy, count as well.
_PROCESSES_PER_CORE = 32
_MIN_PROCESSES = 256
_NETWORK = ("nfs", "cifs", "smb", "fuse.", "lustre", "gpfs", "ceph", "9p", "beegfs")


class Matter(NamedTuple):
    """Something about this machine that costs time, or ends a program.

    Attributes:
        what: What is so, and what comes of it.
        do: What to do.
    """

    what: str
    do: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.epilog = "in a bug report: the output of `grainmill doctor --json`"


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    found = facts()
    matters = list(matters_of(found))
    if options.json:
        print_json({**found, "matters": [{"what": m.what, "do": m.do} for m in matters]})
        return ExitCode.OK
    rows = [
        (name if at == 0 else "", line)
        for name, text in _rows(found)
        for at, line in enumerate(textwrap.wrap(text, _WIDTH - 14, break_on_hyphens=False))
    ]
    print(f"grainmill {found['versions']['grainmill']}\n{table(rows)}\n")
    print("What matters here, worst first:" if matters else "Nothing here stands in the way.")
    for number, matter in enumerate(matters, start=1):
        text = f"{matter.what}. {matter.do}"
        print(
            textwrap.fill(text, _WIDTH, initial_indent=f"  {number}. ", subsequent_indent=" " * 5)
        )
    return ExitCode.OK


def matters_of(found: dict[str, Any]) -> Iterator[Matter]:
    """What of these facts matters, worst first."""
    yield from _matters_of_build(found)
    yield from _matters_of_memory(found)
    yield from _matters_of_cores(found)
    yield from _matters_of_limits(found["limits"], found["cores"]["used"])
    yield from _matters_of_places(found["places"])


def _matters_of_build(found: dict[str, Any]) -> Iterator[Matter]:
    versions = found["versions"]
    if versions["profile"] != "release":
        yield Matter(
            f"The engine was compiled with profile `{versions['profile']}`, slower than wheels",
            "Install a wheel, or `make release` in a checkout; never measure this one",
        )
    if found["environment"].get("GRAINMILL_RESTORE_ANYWAY", "0") not in {"", "0"}:
        yield Matter(
            "`GRAINMILL_RESTORE_ANYWAY` is set: states of other pipelines are restored unchecked",
            "Unset it once the one restore that needed it is done",
        )
    for name, gives in FEATURES.items():
        if name not in versions["features"]:
            yield Matter(
                f"The engine was compiled without {name}: {gives} cannot be used",
                f"Compile it with the cargo feature `{name}`, as wheels are",
            )
    if versions["has_gil"] and found["processes"]["workers"] == "threads":
        yield Matter(
            "Workers are threads on this system, so functions that hold the interpreter lock do "
            "not run in parallel",
            "Train on Linux, or use functions that release the lock (NumPy, `DecodeImage`)",
        )


def _matters_of_memory(found: dict[str, Any]) -> Iterator[Matter]:
    memory = found["memory"]
    usable, available = memory["usable"], memory["available"]
    if usable < _SMALL_MEMORY:
        yield Matter(
            f"This process may use {byte_text(usable)} of memory, a quarter of it for elements "
            "ahead; beyond the limit it is killed",
            "Raise the limit (Docker: `--memory`), or lower "
            "`ReadOptions(ram_budget_bytes=...)` and the number of workers",
        )
    if available is not None and available < usable // 10:
        yield Matter(
            f"Only {byte_text(available)} of memory are available now; what reads files again "
            "and again finds them no longer in memory",
            "Stop what else uses it (`top -o %MEM`)",
        )


def _matters_of_cores(found: dict[str, Any]) -> Iterator[Matter]:
    cores = found["cores"]
    quota, allowed = cores["quota"], cores["affinity"] or cores["machine"] or 1
    if quota is not None and quota < allowed:
        yield Matter(
            f"The control group has the time of {quota:g} cores, of {allowed} that programs see: "
            "libraries that start a thread for each are stopped for a part of every 100 ms",
            "Raise the limit (Docker: `--cpus`; Kubernetes: `limits.cpu`), or set "
            f"`OMP_NUM_THREADS={max(1, int(quota))}`",
        )
    elif cores["used"] == 1:
        yield Matter(
            "There is one core: reading, your functions and the training take turns",
            "Give this process more cores; convert and tokenize once, or use `cache`",
        )
    if cores["affinity"] is not None and cores["affinity"] < (cores["machine"] or 1):
        yield Matter(
            f"This process may run on {cores['affinity']} of {cores['machine']} cores",
            "If that is not meant: `taskset -p` shows it; Slurm: `--cpus-per-task`",
        )


def _matters_of_limits(limits: dict[str, Any], cores: int) -> Iterator[Matter]:
    processes = [(limits["processes"] or [None])[0], limits["processes of the control group"]]
    fewest = min((limit for limit in processes if limit is not None), default=None)
    needed = max(_MIN_PROCESSES, _PROCESSES_PER_CORE * cores)
    if fewest is not None and fewest < needed:
        yield Matter(
            f"At most {fewest:,} processes and threads may run: workers, and the threads of JAX, "
            "may not start",
            f"`ulimit -u {needed}`; Docker: `--pids-limit {needed}`",
        )
    space = (limits["address space"] or [None])[0]
    if space is not None:
        yield Matter(
            f"The address space is limited to {byte_text(space)}, of which mapped files and "
            "reserved memory take far more than they use",
            "`ulimit -v unlimited`; limit memory by a control group",
        )
    files, most = limits["open files"] or (None, None)
    if files is not None and files < _FEW_FILES:
        can = most is None or most >= _FEW_FILES
        yield Matter(
            f"{files:,} files may be open: files of records share a part of them and are opened "
            "again, but sockets and pipes of workers and buckets fail beyond them",
            f"`ulimit -n {_FEW_FILES if most is None else min(most, 16 * _FEW_FILES)}`"
            if can
            else f"Raise the hard limit, now {most:,} (`/etc/security/limits.conf`; Docker: "
            "`--ulimit nofile`)",
        )


def _matters_of_places(places: dict[str, Any]) -> Iterator[Matter]:
    here, temporary, shm = places.values()
    for place, name, otherwise in (
        (here, "the working directory", "write elsewhere"),
        (temporary, "temporary files", "set `TMPDIR`"),
    ):
        if place is not None and place["free"] < _SMALL_DISK:
            yield Matter(
                f"{byte_text(place['free'])} are left on the file system of {name}: "
                "conversions, caches and indices need more",
                f"Free some, or {otherwise}",
            )
    kind = here and here["kind"]
    if kind and kind.startswith(_NETWORK):
        yield Matter(
            f"The working directory is on a network file system ({kind}): each small read waits "
            "for the network",
            "Keep `cache` directories and `GRAINMILL_CACHE_DIR` on a local disk; of a mounted "
            "bucket, give the URL instead (`s3://`, `gs://`)",
        )
    if temporary and temporary["kind"] == "tmpfs":
        yield Matter(
            "Temporary files are kept in memory (tmpfs), where they count as used",
            "Set `TMPDIR` to a directory on a disk for large ones",
        )
    if shm and shm["free"] < _SMALL_SHM:
        yield Matter(
            f"/dev/shm has {byte_text(shm['free'])} left: `SharedMemoryArray`, and workers of "
            "PyTorch, fail beyond it; grainmill's workers do not use it",
            "Docker: `--shm-size=8g`; Kubernetes: an `emptyDir` with `medium: Memory`",
        )


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    versions, cores, memory = found["versions"], found["cores"], found["memory"]
    yield "engine", f"profile {versions['profile']}, with {', '.join(versions['features'])}"
    system = (versions["python"], versions["system"], versions["libc"])
    yield "Python", ", ".join(filter(None, system)) + ("" if versions["has_gil"] else ", no GIL")
    packages = versions["packages"]
    yield "packages", ", ".join(f"{name} {text}" for name, text in packages.items())
    if found["missing"]:
        yield "missing", ", ".join(f"{name} ({gives})" for name, gives in found["missing"].items())
    by = {"machine": "the machine", "affinity": "affinity", "quota": "quota of the control group"}
    parts = [f"{text} {cores[name]:g}" for name, text in by.items() if cores[name] is not None]
    yield "cores", f"{cores['used']} used ({', '.join(parts)})"
    parts = [f"{byte_text(memory['usable'])} may be used of {byte_text(memory['machine'])}"]
    if memory["available"] is not None:
        parts.append(f"{byte_text(memory['available'])} available")
    yield "memory", ", ".join(parts)
    for name, place in found["places"].items():
        if place is not None:
            sizes = f"{byte_text(place['free'])} free of {byte_text(place['bytes'])}"
            yield _SHORT.get(name, name), f"{place['kind'] or 'unknown kind'}, {sizes}"
    yield "limits", ", ".join(_limit_texts(found["limits"])) or "none known"
    yield (
        "workers",
        f"{found['processes']['workers']}; of Python: {found['processes']['start_method']}",
    )
    if found["environment"]:
        yield "variables", " ".join(f"{k}={v}" for k, v in found["environment"].items())


_SHORT = {"working directory": "here", "temporary files": "temporary"}


def _limit_texts(limits: dict[str, Any]) -> Iterator[str]:
    for name, limit in limits.items():
        soft, hard = limit if isinstance(limit, list) else (limit, limit)
        if limit is None:
            continue
        shown = byte_text if name in {"locked bytes", "address space"} else "{:,}".format
        most = f" (of {'any' if hard is None else shown(hard)})" if hard != soft else ""
        yield f"{name} {'any' if soft is None else shown(soft)}{most}"
