"""What a rank called is written down with the line it comes from, and with its times."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from sim.failures import Deadlock
from sim.lockstep.schedule import in_order
from sim.surface.group import Surface
from sim.surface.operations import Operation
from sim.surface.recorder import Recorder
from sim.world import World


def written(lines: list[int], *, name: str) -> Callable[..., None]:
    """A program out of text, with calls on these lines, that goes through them twice."""
    text = ["def program(group, again=True):", *["    pass"] * 40, "    again and program(group, False)"]
    for line in lines:
        text[line - 1] = "    torch.distributed.all_reduce(torch.ones(1), group=group)"
    room: dict[str, Any] = {"torch": torch, "__name__": "somebodys"}
    exec(compile("\n".join(text), f"/far/away/{name}.py", "exec"), room)
    program: Callable[..., None] = room["program"]
    return program


@given(st.lists(st.lists(st.integers(2, 41), min_size=1, max_size=4, unique=True), min_size=1, max_size=5))
def test_a_call_is_named_by_its_line(programs: list[list[int]]) -> None:
    # Programs come and go: what takes the place of one in memory is not it.
    for number, lines in enumerate(programs):
        run = World.lockstep(2).execute(written(lines, name=f"text{number}"))
        sites = [f"text{number}.py:{line}" for line in sorted(lines)]
        assert [call.site for call in run.ledgers[1]] == 2 * sites


def leaves_one_alone(group: dist.ProcessGroup) -> None:
    dist.barrier(group)
    if group.rank() == 0:
        dist.all_reduce(torch.ones(1), group=group, async_op=True)  # which nobody waits for
        dist.barrier(group)


def test_calls_of_a_failed_run_last_to_its_end() -> None:
    with pytest.raises(Deadlock) as caught:
        World.lockstep(2, schedule=in_order()).run(leaves_one_alone)
    alone, gone = caught.value.spans
    assert [span.call.kind for span in alone] == ["barrier", "all_reduce", "barrier"]
    assert [span.call.kind for span in gone] == ["barrier"]
    over, *under_way = alone
    assert over.begin < over.end <= under_way[0].begin
    assert len({span.end for span in under_way}) == 1
    assert under_way[0].begin <= under_way[1].begin < under_way[1].end


def waits_for_nothing(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(1), group=group, async_op=True)


def test_what_nobody_waits_for_ends_as_it_began() -> None:
    (first, second) = World.lockstep(2).execute(waits_for_nothing).spans
    assert all(span.begin == span.end for span in (*first, *second))


class Later:
    """What somebody else finishes."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return False

    def _source_rank(self) -> int:
        return -1


def test_a_call_that_ends_late_ends_in_its_own_ledger() -> None:
    recorder = Recorder(itertools.count(10).__next__)
    group = Surface(0, 1, recorder=recorder, transport=lambda *_: Later(), backend="later", name="0")
    barrier = Operation("barrier", "barrier", (), is_async=True)
    works = [group.issue(barrier) for _ in range(2)]
    first, ends = recorder.calls, recorder.ends
    recorder.renew(lambda call: None)
    group.issue(barrier)
    for work in works:
        assert work is not None
        work.wait()
    assert [call.sequence for call in first] == [0, 1]
    assert ends == [13, 14]
    assert [call.sequence for call in recorder.calls] == [0]
    assert recorder.times(until=99) == ((12, 99),)
