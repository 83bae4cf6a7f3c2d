"""What is not the program's fault is tried once more, and says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from properties import process_programs as programs
from properties.hasty_world import hasty as hasty
from properties.hasty_world import world as world
from properties.timing import fails_within
from sim.failures import InfrastructureFailed, RankFailed, RetryWarning
from sim.processes import pool
from sim.world import World


@contextmanager
def runs_again(match: str) -> Iterator[None]:
    with pytest.warns(RetryWarning, match=match):
        yield


@pytest.mark.gloo
def test_a_process_that_died_between_two_runs_is_replaced(world: World) -> None:
    os.kill(world.run(programs.process_id)[1], signal.SIGKILL)
    with runs_again("process of rank 1 of gloo:3 died before its program.* killed by SIGKILL"):
        run = world.execute(programs.who)
    assert run.retried
    assert run.results[1] == (1, 3)


@pytest.mark.gloo
def test_a_process_that_dies_after_its_result_is_replaced(world: World) -> None:
    with runs_again("died after its program"), pytest.raises(InfrastructureFailed) as caught:
        world.run(programs.dies_after, 1)
    assert caught.value.positions[1].startswith("ended with exit code 0")


@pytest.mark.gloo
def test_a_lost_connection_is_the_networks(world: World, tmp_path: Path) -> None:
    with runs_again("lost its connection to another rank"):
        run = world.execute(programs.cuts_its_connections, str(tmp_path / "once"))
    assert run.retried
    assert run.results == (0, 1, 2)


@pytest.mark.gloo
def test_a_program_may_say_what_a_network_says(world: World) -> None:
    with fails_within(5, RankFailed, "says the program"):
        world.run(programs.raises_as_a_network_would)


@pytest.mark.gloo
def test_a_kill_is_the_machines_if_it_ran_out_of_memory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter(range(100))
    monkeypatch.setattr(pool, "count_memory_kills", lambda: next(counts))
    with runs_again("out of memory"), pytest.raises(InfrastructureFailed, match="out of memory"):
        world.run(programs.dies, 1, "SIGKILL")


@pytest.mark.gloo
def test_a_script_that_starts_worlds_when_imported_is_told(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text("from sim.world import World\nWorld.gloo(2).run(print)\n")
    started = time.monotonic()
    output = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert time.monotonic() - started < 30
    assert output.returncode == 1
    # Once, and not by every rank in turn.
    (told,) = [line for line in output.stderr.splitlines() if "InvalidInput" in line]
    assert '`if __name__ == "__main__":`' in told
    assert str(script) in told
    assert output.stderr.count("Traceback") == 1
