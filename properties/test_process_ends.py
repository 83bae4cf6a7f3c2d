"""No process outlives its world, its failed run or its parent."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from properties import process_programs as programs
from properties.hasty_world import hasty as hasty
from properties.hasty_world import world as world
from sim.failures import RunFailed
from sim.world import World


@pytest.mark.gloo
def test_processes_end_with_their_world() -> None:
    world = World.gloo(2)
    ids = world.run(programs.process_id)
    world.close()
    assert not any(alive(process) for process in ids)
    ids = world.run(programs.process_id)
    del world
    gc.collect()
    assert not any(alive(process) for process in ids)
    assert not {child.pid for child in multiprocessing.active_children()} & set(ids)


@pytest.mark.gloo
def test_processes_end_with_a_failed_run(world: World) -> None:
    ids = world.run(programs.process_id)
    with pytest.raises(RunFailed):
        world.run(programs.raises, 0)
    assert not any(alive(process) for process in ids)


@pytest.mark.gloo
@pytest.mark.parametrize("end", ["return", "kill"])
def test_processes_end_with_their_parent(tmp_path: Path, end: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal\n"
        "from sim.world import World\n"
        "from properties.process_programs import process_id\n"
        "if __name__ == '__main__':\n"
        "    world = World.gloo(2)\n"
        "    print(*world.run(process_id), flush=True)\n"
        + ("    os.kill(os.getpid(), signal.SIGKILL)\n" if end == "kill" else "")
    )
    output = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=Path.cwd())
    ids = [int(word) for word in output.stdout.split()]
    assert len(ids) == 2, output.stderr
    until = time.monotonic() + 5
    while any(alive(process) for process in ids) and time.monotonic() < until:
        os.sched_yield()
    assert not any(alive(process) for process in ids)


def alive(process: int) -> bool:
    """Whether the process runs; one that only waits to be collected does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
