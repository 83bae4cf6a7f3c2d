"""Every fault is injected into an unmodified program, in every world, and named: what, who and where."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from properties.proofs import proves
from refmodel.collectives import all_gather_rows, at_site
from refmodel.errors import InvalidInput
from refmodel.layout.ownership import owner
from sim.cases.build import build_case
from sim.cases.library import find_scenarios
from sim.cases.scenario import Scenario
from sim.failures import Deadlock, Diverged, RankFailed, RunFailed, TimedOut
from sim.faults.fault import KINDS, Fault
from sim.gate.judge import judge
from sim.serving.program import serve
from sim.world import World

SIZE = 3


def layers(group: dist.ProcessGroup) -> list[int]:
    """Two layers of three calls: #0 kv.view, #1 index.view, #2 merge, #3 kv.view, …"""
    rank, size = group.rank(), group.size()
    seen = []
    for layer in range(2):
        for site, width in (("kv.view", 4), ("index.view", 2)):
            rows = torch.full((2, width), 10 * layer + rank)
            seen.append(int(all_gather_rows(rows, [2] * size, group=group, site=site).sum()))
        merged = torch.tensor([rank + layer])
        with at_site("merge"):
            dist.all_reduce(merged, group=group)
        seen.append(int(merged))
    return seen


def ring(group: dist.ProcessGroup) -> list[int]:
    """Two turns round a ring: rank 0 sends first, the others receive first."""
    rank, size = group.rank(), group.size()
    seen = []
    for turn in range(2):
        sent, received = torch.tensor([10 * turn + rank]), torch.tensor([-1])
        for is_send in (rank == 0, rank != 0):
            if is_send:
                with at_site("ring.send"):
                    dist.send(sent, (rank + 1) % size, group=group)
            else:
                with at_site("ring.recv"):
                    dist.recv(received, (rank - 1) % size, group=group)
        seen.append(int(received))
    return seen


def process_id(group: dist.ProcessGroup) -> int:
    return os.getpid()


def alive(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


@dataclass(frozen=True)
class Named:
    """What a world says of a fault."""

    fault: str
    failure: type[RunFailed]
    says: str  # part of the message
    program: Callable[[dist.ProcessGroup], list[int]] = layers
    rank: int | None = 1


PLACE = "rank=1 at=kv.view[1]"

ON_LOCKSTEP = [
    Named(f"die {PLACE}", RankFailed, "InjectedError: die rank=1 at=kv.view[1]"),
    Named(f"raise {PLACE}", RankFailed, "InjectedError: raise rank=1 at=kv.view[1]"),
    Named(f"return {PLACE}", Deadlock, "rank 1 returned before #3 kv.view"),
    Named(f"hang {PLACE}", Deadlock, "rank 1 hangs: after #2 merge it does not come to #3 kv.view"),
    Named(f"skip {PLACE}", Diverged, "rank 1 skipped #3 kv.view"),
    Named(f"twice {PLACE}", Diverged, "rank 1 issued #3 kv.view twice"),
    Named(f"swap {PLACE}", Diverged, "rank 1 swapped #3 kv.view and #4 index.view"),
    Named(f"kind {PLACE}", Diverged, "rank 1 sent another kind at #3 kv.view: broadcast"),
    Named(f"shape {PLACE}", Diverged, "rank 1 sent another shape at #3 kv.view: [4, 4]"),
    Named(f"dtype {PLACE}", Diverged, "rank 1 sent another dtype at #3 kv.view: int32"),
    Named("lose rank=1 at=ring.send", Deadlock, "rank 1 sent #1 ring.send to rank 2", ring),
    Named("repeat rank=1 at=ring.send", Deadlock, "rank 1 sent #1 ring.send to rank 2 twice", ring),
    # All wait, each for the one before it: whose message is missing the calls do not tell.
    Named("skip rank=1 at=ring.send", Deadlock, "rank 2: waits in #0 ring.recv", ring, None),
    Named("hang rank=1 at=ring.send", Deadlock, "rank 1 hangs after #0 ring.recv", ring),
]
ON_GLOO = {
    "die": (RankFailed, "rank 1 died before #3 kv.view; killed by SIGKILL"),
    "return": (Diverged, "rank 1 returned before #3 kv.view"),
    "hang": (TimedOut, "rank 1 hangs: after #2 merge it does not come to #3 kv.view"),
    "lose": (TimedOut, "rank 1 sent #1 ring.send to rank 2"),
    "repeat": (TimedOut, "rank 1 sent #1 ring.send to rank 2 twice"),
    # Ranks wait in gloo and cannot say what they would have called next.
    "skip": (Diverged, "rank 1 skipped #3 kv.view, or swapped it with index.view"),
    "swap": (Diverged, "rank 1 skipped #3 kv.view, or swapped it with index.view"),
}


def on_gloo(named: Named) -> Named:
    """The same on processes; for some another class of failure."""
    kind = named.fault.split()[0]
    if kind not in ON_GLOO:
        return named
    failure, says = ON_GLOO[kind]
    if named.program is ring and kind in ("skip", "hang"):
        says = named.says.replace("waits in", "last call")
        return Named(named.fault, TimedOut, says, ring, named.rank)
    return Named(named.fault, failure, says, named.program, named.rank)


def fault_of(named: Named) -> str:
    return f"{named.fault}".replace(" rank=1", "")


@pytest.fixture(scope="module")
def gloo() -> Iterator[World]:
    # What hangs is named when time is up.
    with World.gloo(SIZE, timeout=3) as world:
        yield world


def check_named(world: World, named: Named, seconds: float) -> None:
    right = world.run(named.program)
    processes = set(world.run(process_id)) - {os.getpid()}
    started = time.monotonic()
    with pytest.raises(named.failure) as caught:
        world.execute(named.program, faults=[Fault.parse(named.fault)])
    assert time.monotonic() - started < seconds
    assert type(caught.value) is named.failure
    assert named.says in str(caught.value)
    assert caught.value.rank == named.rank
    assert len(caught.value.positions) == SIZE  # where the others were
    assert not any(map(alive, processes))
    assert world.run(named.program) == right


@proves("V6")
@pytest.mark.parametrize("named", ON_LOCKSTEP, ids=fault_of)
def test_lockstep_names_each_fault_at_once(named: Named) -> None:
    threads = threading.active_count()
    check_named(World.lockstep(SIZE), named, seconds=1)
    assert threading.active_count() == threads


@proves("V6")
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("named", ON_LOCKSTEP, ids=fault_of)
def test_lockstep_names_it_whatever_the_schedule(named: Named, seed: int) -> None:
    check_named(World.lockstep(SIZE, seed=seed), named, seconds=1)


@proves("V6")
@pytest.mark.gloo
@pytest.mark.parametrize("named", [on_gloo(named) for named in ON_LOCKSTEP], ids=fault_of)
def test_gloo_names_each_fault_within_seconds(gloo: World, named: Named) -> None:
    check_named(gloo, named, seconds=5)


def test_every_kind_of_fault_is_tried_here() -> None:
    tried = {named.fault.split()[0] for named in ON_LOCKSTEP}
    assert tried | {"delay", "values"} == set(KINDS)


def test_the_page_of_faults_says_what_is_said() -> None:
    page = Path(__file__).parent.parent / "docs" / "faults.md"
    if not page.exists():
        pytest.skip("the documentation is not part of the installed package")
    text = page.read_text(encoding="utf-8")
    for named in ON_LOCKSTEP:
        if named.rank is not None:
            assert named.says in text
            assert on_gloo(named).says in text
    for kind in KINDS:
        assert f"| `{kind}` |" in text


def check_values_and_delay(world: World) -> None:
    right = world.run(layers)
    wrong = world.execute(layers, faults=[Fault("values", 1, "merge")]).results
    # One bit of what rank 1 sends: 1 became 0. The world cannot know; whoever checks the values does.
    assert [seen[2] for seen in right] == [3, 3, 3]
    assert [seen[2] for seen in wrong] == [2, 2, 2]
    assert [seen[:2] + seen[3:] for seen in wrong] == [seen[:2] + seen[3:] for seen in right]
    # A message that is late changes nothing for a program that waits for it.
    assert world.execute(ring, faults=[Fault("delay", 1, "ring.send")]).results == tuple(world.run(ring))


def test_lockstep_carries_altered_values_and_late_messages() -> None:
    check_values_and_delay(World.lockstep(SIZE))


@pytest.mark.gloo
def test_gloo_carries_altered_values_and_late_messages(gloo: World) -> None:
    check_values_and_delay(gloo)


def astray(group: dist.ProcessGroup, then: str) -> None:
    """Rank 1 leaves out kv.view, and does not come to another call."""
    rank, size = group.rank(), group.size()
    if rank != 1:
        all_gather_rows(torch.zeros(2, 4), [2] * size, group=group, site="kv.view")
    rows = all_gather_rows(torch.ones(2, 2), [2] * size, group=group, site="index.view")
    while then == "compute on" and rank == 1:
        rows += 1
    if then == "raise" and rank == 1:
        raise ValueError(then)
    if then == "see":
        assert not rows.any()


@pytest.mark.parametrize("then", ["return", "raise", "compute on", "see"])
@pytest.mark.parametrize("seed", range(3))
def test_lockstep_looks_ahead_and_always_comes_back(then: str, seed: int) -> None:
    world, started = World.lockstep(SIZE, seed=seed), time.monotonic()
    with pytest.raises(Diverged, match=r"rank 1 skipped #0 kv\.view") as caught:
        world.run(astray, then)
    assert caught.value.rank == 1
    assert time.monotonic() - started < 2
    assert world.run(process_id) == [os.getpid()] * SIZE


def one_way(group: dist.ProcessGroup) -> int:
    """Rank 1 sends to rank 2 and does not wait."""
    if group.rank() == 1:
        for _ in range(2):
            with at_site("push"):
                dist.isend(torch.tensor([7]), 2, group=group)
    if group.rank() == 2:
        for _ in range(2):
            dist.recv(torch.tensor([0]), 1, group=group)
    return 0


def test_a_message_that_nobody_receives_is_named_although_nobody_waits() -> None:
    world = World.lockstep(SIZE)
    assert world.run(one_way) == [0] * SIZE
    with pytest.raises(Diverged, match="rank 1 sent #2 push to rank 2, which does not receive it"):
        world.execute(one_way, faults=[Fault("repeat", 1, "push[1]")])


def own_rows(group: dist.ProcessGroup) -> list[list[int]]:
    sent = torch.tensor([group.rank()])
    parts = [torch.tensor([-1]) for _ in range(group.size())]
    dist.all_gather(parts, sent)
    return [sent.tolist(), [int(part) for part in parts]]


def test_what_is_sent_is_altered_and_not_what_the_program_keeps() -> None:
    run = World.lockstep(SIZE).execute(own_rows, faults=[Fault("values", 1, "#0")])
    assert run.results[1] == [[1], [0, 0, 2]]


def test_several_faults_can_befall_one_run() -> None:
    faults = [Fault("values", rank, "merge[1]") for rank in range(SIZE)]
    assert World.lockstep(SIZE).execute(layers, faults=faults).results[0][5] == 0 + 3 + 2


# Altered bytes are nothing that a world can see; the identities in the slots are.


def check_values_named(world: World) -> None:
    (scenario,) = find_scenarios("worked/tokens-300")
    assert isinstance(scenario, Scenario)
    case = build_case(scenario)
    run = world.execute(serve, case, faults=[Fault("values", 1, "kv.view")])
    (finding,) = judge(case, run.results, run.ledgers[0])
    assert finding.law == "V1"
    assert finding.what == "64 of 300 rows of the view, first, on ranks 0, 1, 2, 3"
    assert (finding.where.step, finding.where.cache, finding.where.slot) == (1, "kv", 0)
    assert finding.where.page is not None
    assert owner(finding.where.page, case.grid.world_size) == 1  # who sent them


def test_the_gate_names_altered_bytes_by_page_and_slot() -> None:
    check_values_named(World.lockstep(4))


@pytest.mark.gloo
def test_the_gate_names_altered_bytes_on_gloo_too(gloo_world: Callable[[int], World]) -> None:
    check_values_named(gloo_world(4))


# Faults as values.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", ["kv.view", "kv.view[2]", "#5", "ring.py:88"])
def test_a_fault_is_read_as_it_is_written(kind: str, at: str) -> None:
    fault = Fault(kind, 1, at)
    assert Fault.parse(str(fault)) == fault


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "what, who and where"),
        ("skip", "what, who and where"),
        ("skip at=kv.view rank=1", "what, who and where"),
        ("skip rank=-1 at=kv.view", "what, who and where"),
        ("vanish rank=1 at=kv.view", "kind of a fault: expected die, raise"),
        ("skip rank=1 at=kv.view[", "place of a fault"),
        ("skip rank=1 at=kv.view[x]", "place of a fault"),
        ("skip rank=1 at=#", "place of a fault"),
    ],
)
def test_other_texts_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Fault.parse(text)
    assert complaint in str(caught.value)


def test_a_rank_that_the_world_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"rank of a fault: expected 0 … 2, got '?3"):
        World.lockstep(SIZE).execute(layers, faults=[Fault("skip", 3, "kv.view")])


@pytest.mark.parametrize(
    "fault",
    ["skip rank=1 at=nowhere", "skip rank=1 at=#6", "lose rank=1 at=merge"],
)
def test_a_fault_that_never_happens_is_refused(fault: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        World.lockstep(SIZE).execute(layers, faults=[Fault.parse(fault)])
    assert "one of the 6 calls of rank 1, at kv.view, index.view, merge" in str(caught.value)


@pytest.mark.gloo
def test_a_fault_that_never_happens_is_refused_on_gloo_too(gloo: World) -> None:
    with pytest.raises(InvalidInput, match=r"one of the 6 calls of rank 1, at kv\.view, index\.view"):
        gloo.execute(layers, faults=[Fault("skip", 1, "nowhere")])
