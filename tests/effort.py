"""How much the tests search: little in `make test`, as much as hours allow in `make test-long`.

A test that only searches longer takes its number of cases from `cases`, or is marked `long` and
then runs in `make test-long` alone. There, JAX compiles as it does for users.
"""

import contextlib
import importlib.metadata
import os

LONG = bool(os.environ.get("GRAINMILL_LONG"))
# Searches that count their cases begin so many later: another number tries others.
SEED = int(os.environ.get("GRAINMILL_SEED", "0"))
LITTLE_OPTIMISED = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)


def cases(quick: int, long: int) -> int:
    """The number of cases to try: `quick` in `make test`, `long` in `make test-long`."""
    return long if LONG else quick


def start_quickly() -> None:
    """Lets NumPy start no threads in the programs that tests start, unless told otherwise.

    A thread of OpenBLAS looks for work for 0.1 s before it sleeps, as long as such a program
    computes. In `make test-long`, they start as they do for users.
    """
    if not LONG:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def compile_quickly() -> None:
    """Lets XLA optimise little, in this process and those that it starts, unless told otherwise.

    Most of what small models take is compiling them, which takes a third without the kernels that
    fuse operations. Versions of XLA end the process for a setting that they do not know.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("jaxlib")
        if not LONG and tuple(map(int, version.split(".")[:2])) == (0, 10):
            os.environ.setdefault("XLA_FLAGS", LITTLE_OPTIMISED)
