"""V6 and the worlds: one program, any world, one result; and every way to fail is named at once."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import distributed_c10d

from properties.proofs import proves
from refmodel.collectives import Call, all_gather_rows
from refmodel.errors import CpkvError, InvalidInput, Where
from sim.failures import Deadlock, Diverged, RankFailed, RunFailed, TimedOut, WorldUnavailable
from sim.ledger import first_divergence
from sim.world import World, available

Worlds = Callable[..., World]

# Rank programs. Workers import them by name.


def who(group: dist.ProcessGroup) -> tuple[int, int, int, int]:
    return group.rank(), group.size(), dist.get_rank(), dist.get_world_size()


def rows_of_all(group: dist.ProcessGroup, counts: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Rows of rank r hold the numbers r·16, r·16 + 1, …"""
    rank = group.rank()
    rows = (torch.arange(counts[rank] * 3) + 16 * rank).reshape(counts[rank], 3).to(dtype)
    return all_gather_rows(rows, counts, group=group, site="rows")


def every_collective(
    group: dist.ProcessGroup,
) -> tuple[dict[str, list[int]], torch.Tensor, torch.Tensor, list[object]]:
    rank, size = group.rank(), group.size()
    reduced = {}
    for op in ("SUM", "MIN", "MAX", "PRODUCT"):
        reduced[op] = torch.tensor([rank + 1, 2])
        dist.all_reduce(reduced[op], op=getattr(dist.ReduceOp, op))
    parts = [torch.empty(2, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(parts, torch.tensor([rank, -rank]))
    sent = torch.full((3,), rank)
    dist.broadcast(sent, src=size - 1)
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    dist.barrier()
    return {op: tensor.tolist() for op, tensor in reduced.items()}, torch.stack(parts), sent, objects


def gather_sites(
    group: dist.ProcessGroup,
    sites: Sequence[Sequence[str]],
    shape: Any = (2, 4),
    dtype: Any = torch.float32,
) -> int:
    """One all_gather for each of this rank's ``sites[rank]``; ``shape`` and ``dtype`` may be by rank."""
    rank = group.rank()
    shape = shape[rank] if isinstance(shape, list) else shape
    dtype = dtype[rank] if isinstance(dtype, list) else dtype
    for site in sites[rank]:
        counts = [shape[0]] * group.size()
        all_gather_rows(torch.zeros(shape, dtype=dtype), counts, group=group, site=site)
    return rank


def noted_order(group: dist.ProcessGroup, order: list[tuple[int, int]], steps: int) -> int:
    for step in range(steps):
        order.append((step, group.rank()))
        all_gather_rows(torch.zeros(1, 1), [1] * group.size(), group=group, site=f"step {step}")
    return group.rank()


def one_raises(group: dist.ProcessGroup, culprit: int) -> None:
    all_gather_rows(torch.zeros(1, 1), [1] * group.size(), group=group, site="before")
    if group.rank() == culprit:
        raise ZeroDivisionError("of my own making")
    all_gather_rows(torch.zeros(1, 1), [1] * group.size(), group=group, site="after")


def one_dies(group: dist.ProcessGroup, culprit: int, how: str) -> None:
    all_gather_rows(torch.zeros(1, 1), [1] * group.size(), group=group, site="before")
    if group.rank() == culprit:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    all_gather_rows(torch.zeros(1, 1), [1] * group.size(), group=group, site="after")


def one_stays_away(group: dist.ProcessGroup, culprit: int) -> None:
    all_gather_rows(torch.zeros(1, 1), [1] * group.size(), group=group, site="with all")
    if group.rank() != culprit:
        all_gather_rows(torch.zeros(1, 1), [1] * group.size(), group=group, site="without it")


def returns_a_lock(group: dist.ProcessGroup) -> object:
    return threading.Lock()


def process_id(group: dist.ProcessGroup) -> int:
    return os.getpid()


def mixed_kinds(group: dist.ProcessGroup) -> None:
    tensor = torch.zeros(4)
    if group.rank() == 1:
        dist.broadcast(tensor, src=0)
    else:
        dist.all_reduce(tensor)


def mixed_reductions(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.zeros(4), op=dist.ReduceOp.MAX if group.rank() == 1 else dist.ReduceOp.SUM)


def mixed_roots(group: dist.ProcessGroup) -> None:
    dist.broadcast(torch.zeros(4), src=group.rank() % 2)


VIEW_THEN_INDEX = ("view", "index")
SWAPPED_ON_1 = [VIEW_THEN_INDEX, VIEW_THEN_INDEX[::-1], VIEW_THEN_INDEX]

# Arguments of gather_sites with which rank 1 of 3 departs.
DIVERGING: dict[str, tuple[Any, ...]] = {
    "site": (SWAPPED_ON_1,),
    "shape": ([("view",)] * 3, [(2, 4), (2, 5), (2, 4)]),
    "dtype": ([("view",)] * 3, (2, 4), [torch.float32, torch.float64, torch.float32]),
}


@pytest.fixture
def lockstep() -> Iterator[Worlds]:
    """A lockstep world after which nothing is different: no thread, no process group."""
    group_state, threads = distributed_c10d._world, threading.active_count()
    torch_threads = torch.get_num_threads()
    yield World.lockstep
    assert distributed_c10d._world is group_state
    assert not dist.is_initialized()
    assert threading.active_count() == threads
    assert torch.get_num_threads() == torch_threads


# One program, any world, one result.


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_program_knows_its_rank_and_size(lockstep: Worlds, size: int) -> None:
    assert lockstep(size).run(who) == [(rank, size, rank, size) for rank in range(size)]


@pytest.mark.gloo
def test_both_worlds_give_the_same_results(lockstep: Worlds, gloo_world: Worlds) -> None:
    for size in (1, 2, 3):
        for ours, theirs in zip(
            lockstep(size).run(every_collective), gloo_world(size).run(every_collective), strict=True
        ):
            assert ours[0] == theirs[0]
            assert torch.equal(ours[1], theirs[1])
            assert torch.equal(ours[2], theirs[2])
            assert ours[3] == theirs[3]


def test_reductions_fold_over_ranks(lockstep: Worlds) -> None:
    reduced, gathered, sent, objects = lockstep(3).run(every_collective)[0]
    assert reduced == {"SUM": [6, 6], "MIN": [1, 2], "MAX": [3, 2], "PRODUCT": [6, 8]}
    assert gathered.tolist() == [[0, 0], [1, -1], [2, -2]]
    assert sent.tolist() == [2, 2, 2]
    assert objects == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


COUNTS = [(0, 0, 0), (2, 0, 1), (0, 3, 0), (1, 1, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64]


@proves("V6")
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_arrive_in_rank_order_also_without_rows(
    lockstep: Worlds, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    expected = torch.cat([torch.arange(count * 3).reshape(-1, 3) + 16 * r for r, count in enumerate(counts)])
    run = lockstep(3).execute(rows_of_all, counts, dtype)
    for rows in run.results:
        assert rows.dtype == dtype
        assert torch.equal(rows.to(torch.float32), expected.to(dtype).to(torch.float32))
    # A rank without rows calls like any other.
    assert len(set(run.ledgers)) == 1
    assert [call.site for call in run.ledgers[0]] == ["rows"]


@pytest.mark.gloo
@pytest.mark.parametrize("counts", COUNTS)
def test_rows_are_the_same_bytes_in_both_worlds(
    lockstep: Worlds, gloo_world: Worlds, counts: tuple[int, ...]
) -> None:
    for dtype in DTYPES:
        ours = lockstep(3).execute(rows_of_all, counts, dtype)
        theirs = gloo_world(3).execute(rows_of_all, counts, dtype)
        assert ours.ledgers == theirs.ledgers
        for left, right in zip(ours.results, theirs.results, strict=True):
            assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


# Schedules.


def schedule(size: int, seed: int, steps: int = 6) -> list[tuple[int, int]]:
    order: list[tuple[int, int]] = []
    World.lockstep(size, seed=seed).run(noted_order, order, steps)
    return order


@given(size=st.integers(1, 6), seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=30)
def test_one_seed_is_one_schedule(size: int, seed: int) -> None:
    assert schedule(size, seed) == schedule(size, seed)


def test_seeds_differ_in_schedule_and_agree_in_results(lockstep: Worlds) -> None:
    orders = {tuple(schedule(4, seed)) for seed in range(10)}
    assert len(orders) == 10
    results = [lockstep(4, seed=seed).run(rows_of_all, (1, 2, 0, 3), torch.float32)[0] for seed in range(10)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_any_rank_may_be_first_in_any_step() -> None:
    firsts = {
        (order[step * 3][1], step) for seed in range(40) for order in [schedule(3, seed)] for step in range(3)
    }
    assert firsts == {(rank, step) for rank in range(3) for step in range(3)}


def test_exactly_one_rank_runs_at_a_time(lockstep: Worlds) -> None:
    inside = []

    def program(group: dist.ProcessGroup) -> None:
        for _ in range(5):
            inside.append(group.rank())
            sum(range(20_000))  # long enough for the interpreter to switch threads
            assert inside == [group.rank()]
            inside.clear()
            all_gather_rows(torch.zeros(1), [1] * 4, group=group, site="step")

    lockstep(4).run(program)


# Failures of lockstep.


@proves("V6")
@pytest.mark.parametrize("what", DIVERGING)
def test_lockstep_names_the_rank_that_calls_something_else(lockstep: Worlds, what: str) -> None:
    with pytest.raises(Diverged, match="rank 1 issues") as caught:
        lockstep(3).run(gather_sites, *DIVERGING[what])
    assert caught.value.rank == 1
    assert caught.value.where.site == ("index" if what == "site" else "view")
    assert "while ranks 0, 2 issue view: all_gather" in str(caught.value)
    assert len(caught.value.positions) == 3


@proves("V6")
@pytest.mark.parametrize(
    ("program", "odd"),
    [
        (mixed_kinds, "broadcast from 0"),
        (mixed_reductions, "all_reduce MAX"),
        (mixed_roots, "broadcast from 1"),
    ],
)
def test_lockstep_compares_calls_past_the_ledger_too(
    lockstep: Worlds, program: Callable[..., object], odd: str
) -> None:
    with pytest.raises(Diverged, match=rf"rank 1 issues test_worlds.py:\d+: {odd} \[4\] float32") as caught:
        lockstep(3).run(program)
    assert caught.value.rank == 1


def test_two_ranks_that_differ_are_both_named_and_none_blamed(lockstep: Worlds) -> None:
    with pytest.raises(Diverged, match=r"rank 0 issues view: .*, while rank 1 issues index: ") as caught:
        lockstep(2).run(gather_sites, SWAPPED_ON_1)
    assert caught.value.rank is None


@proves("V6")
def test_a_deadlock_is_reported_at_once_with_every_position(lockstep: Worlds) -> None:
    started = time.monotonic()
    with pytest.raises(Deadlock) as caught:
        lockstep(3).run(one_stays_away, 1)
    assert time.monotonic() - started < 1
    waits = "waits in #1 without it: all_gather [1, 1] float32 on group 0"
    assert caught.value.positions == (waits, "finished", waits)
    assert "rank 1: finished" in str(caught.value)


def test_an_exception_ends_the_run_and_keeps_its_traceback(lockstep: Worlds) -> None:
    with pytest.raises(RankFailed) as caught:
        lockstep(4).run(one_raises, 2)
    assert caught.value.rank == 2
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "in one_raises" in caught.value.traceback
    assert "lockstep.py" not in caught.value.traceback
    assert "rank 2 of lockstep:4 failed" in str(caught.value)
    assert "ZeroDivisionError: of my own making" in str(caught.value)


@pytest.mark.parametrize("leave", [SystemExit, KeyboardInterrupt, StopIteration, GeneratorExit])
def test_a_rank_may_leave_by_any_exception(lockstep: Worlds, leave: type[BaseException]) -> None:
    def program(group: dist.ProcessGroup) -> None:
        if group.rank() == 1:
            raise leave
        dist.barrier()

    with pytest.raises(RankFailed, match=leave.__name__):
        lockstep(3).run(program)


def test_finally_blocks_run_one_rank_at_a_time_in_their_own_world(lockstep: Worlds) -> None:
    seen = []

    def program(group: dist.ProcessGroup) -> None:
        try:
            if group.rank() == 0:
                raise ValueError
            dist.barrier()
        finally:
            seen.append((group.rank(), dist.get_rank()))
            if group.rank() == 2:
                dist.barrier()  # nobody will come; it ends here

    with pytest.raises(RankFailed):
        lockstep(3).run(program)
    assert sorted(seen) == [(0, 0), (1, 1), (2, 2)]


def test_handlers_of_a_program_do_not_swallow_the_end_of_its_run(lockstep: Worlds) -> None:
    def program(group: dist.ProcessGroup) -> None:
        if group.rank() == 0:
            raise ValueError("the first")
        try:
            dist.barrier()
        except Exception:
            pytest.fail("a rank went on")

    with pytest.raises(RankFailed, match="the first"):
        lockstep(3).run(program)


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "computing"])
def test_an_interrupt_of_the_caller_unwinds_all_ranks(lockstep: Worlds, waits: bool) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def program(group: dist.ProcessGroup) -> None:
        if group.rank() == 1:
            signal.pthread_kill(main, signal.SIGINT)
        while waits or group.rank() != 1:
            dist.barrier()
        while True:
            pass

    with pytest.raises(KeyboardInterrupt):
        lockstep(3).run(program)


@pytest.mark.parametrize(
    ("name", "attempt"),
    [
        ("reduce", lambda group: dist.reduce(torch.zeros(1), dst=0)),
        ("send", lambda group: dist.send(torch.zeros(1), dst=1 - group.rank())),
        ("async_op", lambda group: dist.all_reduce(torch.zeros(1), async_op=True)),
    ],
)
def test_what_lockstep_does_not_do_is_named(
    lockstep: Worlds, name: str, attempt: Callable[[dist.ProcessGroup], object]
) -> None:
    with pytest.raises(RankFailed, match=name) as caught:
        lockstep(2).run(attempt)
    assert isinstance(caught.value.__cause__, WorldUnavailable)


def test_a_wrong_output_is_refused_before_anything_is_exchanged(lockstep: Worlds) -> None:
    def program(group: dist.ProcessGroup) -> None:
        dist.all_gather([torch.zeros(2), torch.zeros(3)], torch.zeros(2))

    with pytest.raises(RankFailed, match="output list of all_gather") as caught:
        lockstep(2).run(program)
    assert isinstance(caught.value.__cause__, InvalidInput)


def test_a_run_inside_a_rank_is_refused(lockstep: Worlds) -> None:
    with pytest.raises(RankFailed, match="outside of any rank"):
        lockstep(2).run(lambda group: World.lockstep(2).run(who))


def test_runs_from_several_threads_take_turns(lockstep: Worlds) -> None:
    results = []
    threads = [threading.Thread(target=lambda: results.append(lockstep(3).run(who))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[(rank, 3, rank, 3) for rank in range(3)]] * 4


def test_a_process_group_of_the_caller_is_untouched(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    try:
        own = dist.group.WORLD
        assert World.lockstep(3).run(who)[2] == (2, 3, 2, 3)
        with pytest.raises(Deadlock):
            World.lockstep(3).run(one_stays_away, 1)
        assert dist.group.WORLD is own
        assert dist.get_world_size() == 1
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 1
    finally:
        dist.destroy_process_group()


def test_grad_mode_is_of_each_rank(lockstep: Worlds) -> None:
    def program(group: dist.ProcessGroup) -> bool:
        if group.rank() == 0:
            with torch.inference_mode():
                rows = torch.zeros(1)
                dist.all_reduce(rows)
                return torch.is_grad_enabled()
        rows = torch.zeros(1)
        dist.all_reduce(rows)
        return torch.is_grad_enabled()

    for seed in range(4):
        assert lockstep(3, seed=seed).run(program) == [False, True, True]


# Watching.


def test_every_call_is_heard_before_it_is_issued(lockstep: Worlds) -> None:
    heard = []
    run = lockstep(2).execute(gather_sites, [VIEW_THEN_INDEX] * 2, watch=lambda *call: heard.append(call))
    for rank in range(2):
        assert tuple(call for who_calls, call in heard if who_calls == rank) == run.ledgers[rank]


@pytest.mark.gloo
def test_what_a_watcher_raises_is_raised_as_it_is(lockstep: Worlds, gloo_world: Worlds) -> None:
    def watch(rank: int, call: Call) -> None:
        raise BrokenPipeError("watcher")

    for world in (lockstep(2), gloo_world(2)):
        with pytest.raises(BrokenPipeError, match="watcher"):
            world.execute(gather_sites, [VIEW_THEN_INDEX] * 2, watch=watch)
        assert world.run(who) == [(0, 2, 0, 2), (1, 2, 1, 2)]


# Failures of gloo. Each takes the pool with it; the next run starts another.


@proves("V6")
@pytest.mark.gloo
@pytest.mark.parametrize("what", DIVERGING)
def test_gloo_names_the_rank_that_calls_something_else(gloo_world: Worlds, what: str) -> None:
    world = gloo_world(3)
    world.run(who)  # the start is not what is timed
    started = time.monotonic()
    with pytest.raises(Diverged, match="rank 1 issues") as caught:
        world.run(gather_sites, *DIVERGING[what])
    assert time.monotonic() - started < 5
    assert caught.value.rank == 1
    assert "while ranks 0, 2 issue view: all_gather" in str(caught.value)


@proves("V6")
@pytest.mark.gloo
def test_gloo_names_the_rank_that_stays_away(gloo_world: Worlds) -> None:
    world = gloo_world(3)
    world.run(who)
    started = time.monotonic()
    with pytest.raises(
        Diverged, match="rank 1 makes no more calls, while ranks 0, 2 issue without it"
    ) as caught:
        world.run(one_stays_away, 1)
    assert time.monotonic() - started < 5
    assert caught.value.positions[1] == "finished"


@pytest.mark.gloo
def test_gloo_reports_an_exception_with_its_traceback(gloo_world: Worlds) -> None:
    with pytest.raises(RankFailed, match="ZeroDivisionError: of my own making") as caught:
        gloo_world(3).run(one_raises, 2)
    assert caught.value.rank == 2
    assert "in one_raises" in caught.value.traceback
    assert "serve.py" not in caught.value.traceback


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("how", "cause"), [("exit", "ended with exit code 3"), ("kill", "killed by SIGKILL")]
)
def test_gloo_reports_a_dead_rank_and_its_last_call(gloo_world: Worlds, how: str, cause: str) -> None:
    world = gloo_world(3)
    with pytest.raises(RankFailed, match=cause) as caught:
        world.run(one_dies, 1, how)
    assert caught.value.rank == 1
    assert caught.value.where.site == "before"
    assert caught.value.positions[1] == f"{cause}, last call #0 before: all_gather [1, 1] float32 on group 0"
    assert world.run(who) == [(rank, 3, rank, 3) for rank in range(3)]


LOOPING = """
from refmodel.collectives import all_gather_rows
import torch

def program(group):
    all_gather_rows(torch.zeros(1, 1), [1, 1], group=group, site="before")
    while group.rank() == 0:
        pass
    all_gather_rows(torch.zeros(1, 1), [1, 1], group=group, site="after")
"""


@pytest.mark.gloo
def test_gloo_keeps_its_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A module of its own: importing this one takes a worker longer than the limit.
    (tmp_path / "looping.py").write_text(LOOPING)
    monkeypatch.syspath_prepend(tmp_path)
    with World.gloo(2, timeout=1) as world:
        with pytest.raises(TimedOut, match="did not finish") as caught:
            world.run(importlib.import_module("looping").program)
        assert "#0 before" in caught.value.positions[0]
        assert "#1 after" in caught.value.positions[1]


@pytest.mark.gloo
def test_gloo_refuses_what_cannot_travel_and_goes_on(gloo_world: Worlds) -> None:
    world = gloo_world(2)
    before = world.run(process_id)
    with pytest.raises(InvalidInput, match="program between processes"):
        world.run(lambda group: None)
    with pytest.raises(InvalidInput, match="argument 1 between processes"):
        world.run(gather_sites, 0, threading.Lock())
    assert world.run(process_id) == before  # nothing was sent: the same processes
    with pytest.raises(InvalidInput, match="result between processes"):
        world.run(returns_a_lock)
    assert world.run(who) == [(0, 2, 0, 2), (1, 2, 1, 2)]


@pytest.mark.gloo
def test_a_program_of_another_folder_is_found_by_running_workers(
    gloo_world: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = gloo_world(2)
    world.run(who)
    (tmp_path / "elsewhere.py").write_text("def program(group): return group.rank() + 10\n")
    monkeypatch.syspath_prepend(tmp_path)
    elsewhere = importlib.import_module("elsewhere")

    assert world.run(elsewhere.program) == [10, 11]
    (tmp_path / "elsewhere.py").unlink()
    monkeypatch.undo()
    with World.gloo(2) as fresh, pytest.raises(InvalidInput, match="No module named 'elsewhere'"):
        fresh.run(elsewhere.program)


@pytest.mark.gloo
def test_arguments_stay_the_callers_own(gloo_world: Worlds) -> None:
    counts = torch.tensor([1, 2])
    gloo_world(2).run(write_into, counts)
    assert counts.tolist() == [1, 2]
    assert not counts.is_shared()


def write_into(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    tensor.fill_(group.rank())


@pytest.mark.gloo
def test_processes_end_with_their_world() -> None:
    world = World.gloo(2)
    ids = world.run(process_id)
    world.close()
    assert not any(alive(process) for process in ids)
    ids = world.run(process_id)
    del world
    gc.collect()
    assert not any(alive(process) for process in ids)
    assert not {child.pid for child in multiprocessing.active_children()} & set(ids)


@pytest.mark.gloo
@pytest.mark.parametrize("end", ["return", "kill"])
def test_processes_end_with_their_parent(tmp_path: Path, end: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal\n"
        "from sim.world import World\n"
        "from properties.test_worlds import process_id\n"
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


# Ledgers.


def ledger_of(*sites: str, rank_count: int = 3, group: str = "0") -> list[Call]:
    return [
        Call(n, site, "all_gather", (2,), "float32", group, rank_count, 8) for n, site in enumerate(sites)
    ]


@proves("V6")
@given(
    sites=st.lists(st.sampled_from("abc"), max_size=6),
    size=st.integers(3, 6),
    data=st.data(),
)
@settings(deadline=None)
def test_the_first_divergence_names_the_odd_rank(sites: list[str], size: int, data: st.DataObject) -> None:
    ledgers = [ledger_of(*sites, rank_count=size) for _ in range(size)]
    assert first_divergence(ledgers) is None
    odd = data.draw(st.integers(0, size - 1))
    place = data.draw(st.integers(0, len(sites)))
    ledgers[odd] = ledger_of(*sites[:place], "x", *sites[place + 1 :], rank_count=size)
    found = first_divergence(ledgers)
    assert found is not None
    assert (found.sequence, found.odd) == (place, (odd,))
    assert found.call is not None
    assert found.call.site == "x"
    assert f"rank {odd} issues x" in str(found)


@proves("V6")
def test_a_ledger_that_ends_early_is_named() -> None:
    found = first_divergence([ledger_of("a", "b"), ledger_of("a"), ledger_of("a", "b")])
    assert found is not None
    assert (found.odd, found.call) == ((1,), None)
    assert str(found) == (
        "at call 1, rank 1 makes no more calls, while ranks 0, 2 issue b: all_gather [2] float32"
    )


def test_without_a_majority_nobody_is_blamed() -> None:
    found = first_divergence([ledger_of("a"), ledger_of("b"), ledger_of("c")])
    assert found is not None
    assert found.odd == ()
    assert str(found).count(", while ") == 2


def test_calls_of_subgroups_are_compared_among_their_members() -> None:
    pair, others = ledger_of("p", rank_count=2, group="1"), ledger_of("q", rank_count=2, group="2")
    everyone = ledger_of("a", rank_count=4)
    assert first_divergence([pair + everyone, everyone + pair, others + everyone, others + everyone]) is None
    wrong = ledger_of("r", rank_count=2, group="1")
    found = first_divergence([pair + everyone, wrong + everyone, everyone, everyone])
    assert found is not None
    assert [rank for rank, _ in found.calls] == [0, 1]


# Input, and errors as values.


@pytest.mark.parametrize("size", [0, -1, 1025, True, 2.0, "2"])
def test_lockstep_refuses_sizes_without_meaning(size: int) -> None:
    with pytest.raises(InvalidInput, match="ranks of lockstep"):
        World.lockstep(size)


@pytest.mark.parametrize(("size", "timeout"), [(0, 1), (65, 1), (2, 0), (2, -1), (2, float("nan")), (2, 1e9)])
def test_gloo_refuses_sizes_and_limits_without_meaning(size: int, timeout: float) -> None:
    with pytest.raises(InvalidInput):
        World.gloo(size, timeout=timeout)


def test_worlds_have_names() -> None:
    assert str(World.parse("lockstep:4")) == "lockstep:4"
    assert (World.parse("gloo:2").kind, World.parse("gloo:2").size) == ("gloo", 2)


@pytest.mark.parametrize(
    "text", ["", "lockstep", "lockstep:", "lockstep:0", "lockstep:x", "mpi:2", "gloo:-1", "gloo:²"]
)
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        World.parse(text)


def test_what_is_available_can_be_made() -> None:
    kinds = {entry.kind: entry for entry in available()}
    assert set(kinds) == {"lockstep", "gloo", "nccl"}
    for entry in kinds.values():
        assert entry.available == (entry.largest > 0)
        assert entry.note
    assert World.lockstep(kinds["lockstep"].largest).size == kinds["lockstep"].largest


@pytest.mark.parametrize("kind", [RunFailed, RankFailed, Deadlock, Diverged, TimedOut, WorldUnavailable])
def test_failures_are_of_the_family_and_travel(kind: type[RunFailed]) -> None:
    extra = {"traceback": "Traceback: …"} if kind is RankFailed else {}
    failure = kind(
        "a run",
        expected="x",
        received="y",
        where=Where(rank=1),
        fix="Do z.",
        positions=("here", "there"),
        **extra,
    )
    assert isinstance(failure, CpkvError)
    copy = pickle.loads(pickle.dumps(failure))
    assert type(copy) is kind
    assert str(copy) == str(failure)
    assert (copy.rank, copy.positions) == (1, ("here", "there"))
    assert "\n  rank 1: there" in str(copy)


def test_a_large_world_runs(lockstep: Worlds) -> None:
    assert lockstep(300).run(who)[299] == (299, 300, 299, 300)
