"""What a worker says that no Python says: C++, on its way to abort, and Python's own fault handler.

It goes to a file of each worker. When a rank fails, gloo and NCCL abort the processes of the others, each
with words that name a consequence; only those of the rank that is to blame belong into the failure.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

# Of a stack in C++ and one in Python, the end.
_LONGEST = 4_000


def keep_words(folder: str, rank: int) -> None:
    """In a worker, from now on. What Python prints is still seen at once."""
    # Whoever prints in Python has looked up sys.stderr; C++ knows but the number.
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    file = os.open(_file(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 2)
    os.close(file)
    faulthandler.enable(2, all_threads=False)


def last_words(folder: str, rank: int) -> str:
    """Of a worker that has died, the end of them; empty if it died without any."""
    file = _file(folder, rank)
    return _read(file)[-_LONGEST:].strip() if file.exists() else ""


def pass_on_words(folder: str, size: int) -> None:
    """Print what the workers said in a run that held: warnings, or what they were told to log."""
    for rank in range(size):
        file = _file(folder, rank)
        if file.stat().st_size:
            sys.stderr.write(_read(file))
            os.truncate(file, 0)


def _read(file: Path) -> str:
    return file.read_text(errors="backslashreplace")


def _file(folder: str, rank: int) -> Path:
    return Path(folder) / f"words.{rank}"
