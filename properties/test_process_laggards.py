"""When time is up, the rank that the others wait for is named, and where it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from properties import process_programs as programs
from properties.hasty_world import hasty as hasty
from properties.hasty_world import world as world
from properties.timing import fails_within
from refmodel.collectives import Call
from sim.failures import TimedOut
from sim.processes.laggards import find_standstill, line_of_stack
from sim.world import World


@pytest.mark.gloo
@pytest.mark.parametrize("program", [programs.computes_on, programs.sleeps])
def test_when_time_is_up_the_laggard_is_named(world: World, program: Callable[..., None]) -> None:
    started = time.monotonic()
    with fails_within(5, TimedOut, "ranks 0, 2 wait in #1 after: .*; rank 1 has not come to it") as caught:
        world.run(program, 1)
    assert 3 <= time.monotonic() - started < 4
    assert caught.value.rank == 1
    waits = "waits in #1 after: all_gather [1, 1] float32 on group 0"
    assert (caught.value.positions[0], caught.value.positions[2]) == (waits, waits)
    assert "last call #0 before" in caught.value.positions[1]
    assert "now at process_programs.py:" in caught.value.positions[1]


@pytest.mark.gloo
def test_a_rank_that_waits_outside_of_calls_is_found_too(world: World) -> None:
    with fails_within(5, TimedOut, "did not finish") as caught:
        world.run(programs.skips_a_group)
    assert "now at process_programs.py:" in caught.value.positions[0]
    assert "now at process_programs.py:" in caught.value.positions[1]


def call(sequence: int, site: str, group: str = "0", size: int = 3) -> Call:
    return Call(sequence, site, "all_gather", (1,), "uint8", group, size, num_bytes=1)


def test_a_standstill_names_those_that_nobody_waits_for_in_vain() -> None:
    # 0 waits for 1 in a group of two, 1 for 2 in the group of all.
    ledgers = [
        [call(0, "pair", "1", 2), call(1, "pair", "1", 2)],
        [call(0, "pair", "1", 2), call(1, "all")],
        [],
    ]
    found = find_standstill(ledgers)
    assert (list(found.waits), found.awaited) == ([0, 1], {2: None})
    assert "rank 2 has not come to them, it has called nothing yet" in str(found)
    assert find_standstill([[call(0, "a")]] * 3).waits == {}
    circle = [[call(0, "a", "0", 2)], [call(0, "b", "1", 2)]]
    assert "each waits for another that waits elsewhere" in str(find_standstill(circle))


def test_a_stack_tells_the_line_of_the_program() -> None:
    stack = (
        'Thread 0x1 (most recent call first):\n  File "/x/other.py", line 1 in f\n\n'
        "Current thread 0x2 (most recent call first):\n"
        f'  File "{threading.__file__}", line 300 in wait\n'
        f'  File "{Path(torch.__file__).parent}/distributed/x.py", line 5 in all_reduce\n'
        '  File "/x/ring.py", line 88 in program\n'
    )
    assert line_of_stack(stack) == "ring.py:88"
    assert line_of_stack("") == line_of_stack(stack[: stack.index("Current")]) == ""
