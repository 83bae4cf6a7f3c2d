"""A file of kernels as a user has one: a right one, a wrong one, or any text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

RIGHT = """
from refmodel.ops.layout import LOGICAL_TO_PHYSICAL, OWNER_MASK, RERANGE

def logical_to_physical(slots, rank, world_size, page_size):
    return LOGICAL_TO_PHYSICAL.reference(slots, rank, world_size, page_size)[0]
"""

WRONG = """
def logical_to_physical(slots, rank, world_size, page_size):
    return slots // world_size
"""

Write = Callable[[str], Path]


@pytest.fixture
def kernels(tmp_path: Path) -> Write:
    """``kernels(source)``: a file of kernels."""

    def write(source: str) -> Path:
        file = tmp_path / "mine.py"
        file.write_text(source)
        return file

    return write
