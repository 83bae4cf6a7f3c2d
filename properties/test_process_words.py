"""What a worker says beneath Python belongs to the rank that is to blame, and to nobody else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from properties import process_programs as programs
from properties.hasty_world import hasty as hasty
from properties.hasty_world import world as world
from properties.timing import fails_within
from sim.failures import RankFailed
from sim.world import World

SCRIPT = """
from properties import process_programs as programs
from sim.failures import RankFailed
from sim.world import World

if __name__ == "__main__":
    with World.gloo(3) as world:
        for name, args in {runs}:
            try:
                world.run(getattr(programs, name), *args)
            except RankFailed:
                pass
"""


def heard(tmp_path: Path, *runs: tuple[str, tuple[int, ...]]) -> list[str]:
    """What a script of its own prints that runs these programs: workers print where their server was born."""
    script = tmp_path / "words.py"
    script.write_text(SCRIPT.format(runs=runs))
    output = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True)
    return output.stderr.splitlines()


@pytest.mark.gloo
def test_the_last_words_of_a_rank_are_in_its_failure(world: World) -> None:
    with fails_within(5, RankFailed, "killed by SIGABRT") as caught:
        world.run(programs.aborts, 1)
    assert caught.value.rank == 1
    assert "terminate called after throwing an instance of my own" in str(caught.value)
    # And where in Python that was.
    assert "process_programs.py" in str(caught.value)


@pytest.mark.gloo
def test_nobody_speaks_for_another(world: World) -> None:
    with fails_within(5, RankFailed, "rank 1 .*killed by SIGKILL") as caught:
        world.run(programs.makes_others_abort, 1)
    assert "terminate" not in str(caught.value)


@pytest.mark.gloo
def test_ranks_that_abort_print_nothing(tmp_path: Path) -> None:
    assert not heard(tmp_path, ("aborts", (1,)), ("makes_others_abort", (1,)))


@pytest.mark.gloo
def test_what_is_said_in_a_run_that_holds_is_heard_once(tmp_path: Path) -> None:
    lines = heard(tmp_path, ("speaks", ()), ("speaks", ()))
    for way in ("in", "beneath"):
        expected = [f"rank {rank} {way} Python" for rank in range(3)]
        assert sorted(line for line in lines if way in line) == sorted(2 * expected)


@pytest.mark.gloo
def test_python_is_heard_at_once(tmp_path: Path) -> None:
    lines = heard(tmp_path, ("speaks", (1,)))
    assert sorted(lines) == [f"rank {rank} in Python" for rank in range(3)]
