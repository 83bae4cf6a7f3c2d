"""Why a process ended: by itself, by a signal, or because the machine ran out of memory."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

# Of the whole machine, and of the container. Each has a line "oom_kill 3".
_COUNTERS = (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events"))


def cause_of_death(exit_code: int | None) -> str:
    """An exit code of ``multiprocessing`` in words.

    >>> cause_of_death(3), cause_of_death(-9)
    ('ended with exit code 3', 'killed by SIGKILL')
    """
    if exit_code is not None and exit_code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-exit_code).name}"
        return f"killed by signal {-exit_code}"
    return f"ended with exit code {exit_code}"


def count_memory_kills() -> int:
    """How many processes were killed since boot because memory ran out; 0 where nobody counts."""
    kills = 0
    for counter in _COUNTERS:
        with suppress(OSError, ValueError):
            fields = dict(line.split(maxsplit=1) for line in counter.read_text().splitlines())
            kills += int(fields.get("oom_kill", "0"))
    return kills
