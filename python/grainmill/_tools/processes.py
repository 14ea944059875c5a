"""CPU time and memory of this process and of those that it has started."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


class Usage:
    """CPU time and memory so far; memory of other processes is known on Linux only.

    Attributes:
        peak_bytes: The most memory at a sample, all processes together.
        max_processes: The most processes at a sample.
        memory_bytes: The memory at the last sample.
    """

    def __init__(self) -> None:
        self.peak_bytes = self.memory_bytes = 0
        self.max_processes = 1
        self._cpu: dict[int, float] = {}
        self.sample()

    def sample(self) -> None:
        """Looks at all processes."""
        found = [os.getpid(), *_descendants(os.getpid())]
        memory = 0
        for pid in found:
            memory += _memory(pid)
            self._cpu[pid] = _cpu_s(pid) or self._cpu.get(pid, 0.0)
        if memory == 0 and resource is not None:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            memory = peak if sys.platform == "darwin" else peak * 1024
        self.memory_bytes = memory
        self.peak_bytes = max(self.peak_bytes, memory)
        self.max_processes = max(self.max_processes, len(found))

    def cpu_s(self) -> float:
        """The seconds of CPU time, of processes as of their last sample."""
        self.sample()
        others = sum(cpu for pid, cpu in self._cpu.items() if pid != os.getpid())
        return time.process_time() + others


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    pending = [pid]
    while pending:
        for children in Path(f"/proc/{pending.pop()}/task").glob("*/children"):
            try:
                new = [int(child) for child in children.read_text("ascii").split()]
            except OSError:
                continue
            found += new
            pending += new
    return found


def _memory(pid: int) -> int:
    """The memory of a process, of shared pages its share."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _cpu_s(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace")
        fields = text.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0
