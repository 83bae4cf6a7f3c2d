"""A world of processes with a short time limit, as tests share it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from properties import process_programs as programs
from sim.world import World


@pytest.fixture(scope="module")
def hasty() -> Iterator[World]:
    """Three ranks with a short time limit, in processes that have already begun to run programs."""
    with World.gloo(3, timeout=3) as world:
        yield world


@pytest.fixture
def world(hasty: World) -> World:
    """The same, started: its start is not what is timed."""
    assert hasty.run(programs.who) == [(rank, 3) for rank in range(3)]
    return hasty
