"""The lockstep world: ranks take turns, and every way to fail is named at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from properties.programs import gather_sites, one_raises, one_stays_away, who
from properties.proofs import proves
from refmodel.collectives import all_gather_rows
from refmodel.errors import InvalidInput
from sim.failures import Deadlock, Diverged, RankFailed
from sim.world import World

Worlds = Callable[..., World]

VIEW_THEN_INDEX = ("view", "index")
SWAPPED_ON_1 = [VIEW_THEN_INDEX, VIEW_THEN_INDEX[::-1], VIEW_THEN_INDEX]

# Arguments of gather_sites with which rank 1 of 3 departs.
DIVERGING: dict[str, tuple[Any, ...]] = {
    "site": (SWAPPED_ON_1,),
    "shape": ([("view",)] * 3, [(2, 4), (2, 5), (2, 4)]),
    "dtype": ([("view",)] * 3, (2, 4), [torch.float32, torch.float64, torch.float32]),
}


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


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_program_knows_its_rank_and_size(lockstep: Worlds, size: int) -> None:
    assert lockstep(size).run(who) == [(rank, size, rank, size) for rank in range(size)]


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


@proves("V6")
@pytest.mark.parametrize("what", DIVERGING)
def test_lockstep_names_the_rank_that_calls_something_else(lockstep: Worlds, what: str) -> None:
    with pytest.raises(Diverged, match="rank 1 issues") as caught:
        lockstep(3).run(gather_sites, *DIVERGING[what])
    assert caught.value.rank == 1
    assert caught.value.where.site == "view"
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
    with pytest.raises(Diverged, match=rf"rank 1 issues test_lockstep.py:\d+: {odd} \[4\] float32") as caught:
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

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell puts behind ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            lockstep(3).run(program)
    finally:
        signal.signal(signal.SIGINT, before)


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


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no thread stays on a processor here")
def test_ranks_share_one_processor_and_the_caller_gets_its_own_back(lockstep: Worlds) -> None:
    before = os.sched_getaffinity(0)
    one, *others = lockstep(4).run(lambda group: os.sched_getaffinity(0))
    assert len(one) == 1
    assert one <= before
    assert others == [one] * 3
    with pytest.raises(Deadlock):
        lockstep(3).run(one_stays_away, 1)
    assert os.sched_getaffinity(0) == before


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


def test_every_call_is_heard_before_it_is_issued(lockstep: Worlds) -> None:
    heard = []
    run = lockstep(2).execute(gather_sites, [VIEW_THEN_INDEX] * 2, watch=lambda *call: heard.append(call))
    for rank in range(2):
        assert tuple(call for who_calls, call in heard if who_calls == rank) == run.ledgers[rank]


@pytest.mark.parametrize("size", [0, -1, 1025, True, 2.0, "2"])
def test_lockstep_refuses_sizes_without_meaning(size: int) -> None:
    with pytest.raises(InvalidInput, match="ranks of lockstep"):
        World.lockstep(size)


def test_a_large_world_runs(lockstep: Worlds) -> None:
    assert lockstep(300).run(who)[299] == (299, 300, 299, 300)
