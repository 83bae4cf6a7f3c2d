"""What a program does in processes is recorded, and harms no program after it."""

from __future__ import annotations

import time

import pytest

from properties import process_programs as programs
from properties.hasty_world import hasty as hasty
from properties.hasty_world import world as world
from sim.world import World


@pytest.mark.gloo
def test_every_call_of_a_foreign_program_is_recorded(world: World) -> None:
    run = world.execute(programs.raw_calls)
    assert run.results == ([3.0, 3.0], [3.0, 3.0], [3.0, 3.0])
    kinds = [[call.kind for call in ledger if call.group == "0"] for ledger in run.ledgers]
    tail = ["all_gather", "all_gather", "barrier"]
    assert kinds == [
        ["all_reduce", "send", *tail],
        ["all_reduce", "recv", *tail],
        ["all_reduce", *tail],
    ]
    in_pair = [[call.kind for call in ledger if call.group != "0"] for ledger in run.ledgers]
    assert in_pair == [["broadcast"], ["broadcast"], []]
    assert all(call.site.startswith("process_programs.py:") for ledger in run.ledgers for call in ledger[:1])
    assert not run.retried


@pytest.mark.gloo
def test_each_call_has_its_time(world: World) -> None:
    before = time.monotonic_ns()
    run = world.execute(programs.raw_calls)
    for ledger, spans in zip(run.ledgers, run.spans, strict=True):
        assert tuple(span.call for span in spans) == ledger
        assert all(before < span.begin <= span.end < time.monotonic_ns() for span in spans)


@pytest.mark.gloo
def test_asynchronous_calls_are_asynchronous(world: World) -> None:
    assert all(world.run(programs.meets_late))


@pytest.mark.gloo
def test_a_program_meets_nothing_of_an_earlier_one(world: World) -> None:
    assert world.run(programs.group_name) == world.run(programs.group_name) == ["1"] * 3
    assert world.run(programs.random_numbers) == world.run(programs.random_numbers)


@pytest.mark.gloo
def test_a_program_that_leaves_the_group_harms_nobody(world: World) -> None:
    assert world.run(programs.leaves_the_group) == [0, 1, 2]
    assert world.run(programs.who)[2] == (2, 3)
