"""A program that fails in processes is named in seconds, and the rank that is to blame with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from properties import process_programs as programs
from properties.hasty_world import hasty as hasty
from properties.hasty_world import world as world
from properties.programs import gather_sites, one_stays_away
from properties.proofs import proves
from properties.timing import fails_within
from sim.failures import Diverged, RankFailed
from sim.world import World

# Each failure takes the processes with it; the next run starts others.


# Arguments of gather_sites with which rank 1 of 3 departs.
DIVERGING: dict[str, tuple[Any, ...]] = {
    "site": ([("view", "index"), ("index", "view"), ("view", "index")],),
    "shape": ([("view",)] * 3, [(2, 4), (2, 5), (2, 4)]),
    "dtype": ([("view",)] * 3, (2, 4), [torch.float32, torch.float64, torch.float32]),
}


@proves("V6")
@pytest.mark.gloo
@pytest.mark.parametrize("what", DIVERGING)
def test_the_rank_that_calls_something_else_is_named(world: World, what: str) -> None:
    with fails_within(5, Diverged, "rank 1 issues .*while ranks 0, 2 issue view: all_gather") as caught:
        world.run(gather_sites, *DIVERGING[what])
    assert caught.value.rank == 1


@proves("V6")
@pytest.mark.gloo
def test_the_rank_that_stays_away_is_named(world: World) -> None:
    match = "rank 1 makes no more calls, while ranks 0, 2 issue without it"
    with fails_within(5, Diverged, match) as caught:
        world.run(one_stays_away, 1)
    assert caught.value.positions[1] == "finished"


@pytest.mark.gloo
def test_an_exception_has_its_traceback(world: World) -> None:
    with fails_within(5, RankFailed, "ZeroDivisionError: of my own making") as caught:
        world.run(programs.raises, 2)
    assert caught.value.rank == 2
    assert "in raises" in caught.value.traceback
    assert "sim/" not in caught.value.traceback


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("exit", "ended with exit code 3"),
        ("SIGKILL", "killed by SIGKILL"),
        ("SIGSEGV", "killed by SIGSEGV"),
        ("SIGABRT", "killed by SIGABRT"),
    ],
)
def test_a_death_in_the_program_is_the_programs(world: World, how: str, cause: str) -> None:
    with fails_within(5, RankFailed, cause) as caught:
        world.run(programs.dies, 1, how)
    assert caught.value.rank == 1
    assert caught.value.positions[1] == f"{cause}, last call #0 before: all_gather [1, 1] float32 on group 0"
    assert world.run(programs.who)[0] == (0, 3)
