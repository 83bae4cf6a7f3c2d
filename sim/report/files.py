"""Files that a command is asked to write."""

from __future__ import annotations

from pathlib import Path

from refmodel.errors import InvalidInput


def check_writable(**files: Path | None) -> None:
    """InvalidInput, named after the option, for a file that cannot be there: before any work is done."""
    for option, file in files.items():
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise InvalidInput(f"--{option}", expected="a file in a folder that exists", received=file)
