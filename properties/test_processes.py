"""Worlds of processes: what a program does there is recorded, and whatever goes wrong is named in seconds."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from properties import process_programs as programs
from properties.programs import gather_sites, one_stays_away
from properties.proofs import proves
from properties.timing import fails_within
from refmodel.collectives import Call
from refmodel.errors import InvalidInput
from sim.failures import (
    Diverged,
    InfrastructureFailed,
    RankFailed,
    RetryWarning,
    RunFailed,
    TimedOut,
)
from sim.processes import pool
from sim.processes.laggards import find_standstill, line_of_stack
from sim.processes.parcel import pack, unpack
from sim.world import World

Worlds = Callable[..., World]


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


# What a program does.


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


# Failures. Each takes the processes with it; the next run starts others.


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


# Infrastructure: not the program's fault, and tried once more.


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
def test_a_world_that_does_not_start_says_why(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text("from sim.world import World\nWorld.gloo(2).run(print)\n")
    started = time.monotonic()
    output = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert time.monotonic() - started < 30
    assert output.returncode == 1
    assert "InfrastructureFailed: gloo:2 does not start" in output.stderr
    assert '`if __name__ == "__main__":`' in output.stderr


# Input.


@pytest.mark.gloo
def test_what_cannot_travel_is_refused_and_the_pool_goes_on(gloo_world: Worlds) -> None:
    world = gloo_world(2)
    before = world.run(programs.process_id)
    with pytest.raises(InvalidInput, match="program between processes"):
        world.run(lambda group: None)
    with pytest.raises(InvalidInput, match="argument 1 between processes"):
        world.run(programs.dies, 0, threading.Lock())
    assert world.run(programs.process_id) == before  # nothing was sent: the same processes
    with pytest.raises(InvalidInput, match="result between processes"):
        world.run(programs.returns_a_lock)
    assert world.run(programs.who) == [(0, 2), (1, 2)]


@pytest.mark.gloo
def test_a_program_of_another_folder_is_found_by_running_workers(
    gloo_world: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = gloo_world(2)
    world.run(programs.who)
    (tmp_path / "elsewhere.py").write_text("def program(group): return group.rank() + 10\n")
    monkeypatch.syspath_prepend(tmp_path)
    elsewhere = importlib.import_module("elsewhere")

    assert world.run(elsewhere.program) == [10, 11]
    (tmp_path / "elsewhere.py").unlink()
    monkeypatch.undo()
    with World.gloo(2) as fresh:
        with pytest.raises(InvalidInput, match="No module named 'elsewhere'"):
            fresh.run(elsewhere.program)
        assert fresh.run(programs.who) == [(0, 2), (1, 2)]


@pytest.mark.gloo
def test_arguments_stay_the_callers_own(gloo_world: Worlds) -> None:
    counts = torch.tensor([1, 2])
    gloo_world(2).run(programs.write_into, counts)
    assert counts.tolist() == [1, 2]
    assert not counts.is_shared()


@pytest.mark.parametrize(("size", "timeout"), [(0, 1), (65, 1), (2, 0), (2, -1), (2, float("nan")), (2, 1e9)])
@pytest.mark.parametrize("make", [World.gloo, World.nccl])
def test_sizes_and_limits_without_meaning_are_refused(make: Worlds, size: int, timeout: float) -> None:
    with pytest.raises(InvalidInput):
        make(size, timeout=timeout)


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_travel_with_every_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    (copy,) = unpack(pack([tensor]))
    assert (copy.dtype, copy.shape) == (dtype, tensor.shape)
    assert torch.equal(copy.view(torch.uint8), tensor.view(torch.uint8))


# Processes end.


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
