"""One program, any world, one result; and worlds and failures as values."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch

from properties.programs import gather_sites, rows_of_all, who
from properties.proofs import proves
from refmodel.collectives import Call
from refmodel.errors import CpkvError, InvalidInput, Where
from sim.failures import (
    Deadlock,
    Diverged,
    InfrastructureFailed,
    Nondeterministic,
    RankFailed,
    RunFailed,
    TimedOut,
    WorldUnavailable,
)
from sim.machine import available
from sim.world import World

Worlds = Callable[..., World]

COUNTS = [(0, 0, 0), (2, 0, 1), (0, 3, 0), (1, 1, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64]


@proves("V6")
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_arrive_in_rank_order_also_without_rows(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    expected = torch.cat([torch.arange(count * 3).reshape(-1, 3) + 16 * r for r, count in enumerate(counts)])
    run = World.lockstep(3).execute(rows_of_all, counts, dtype)
    for rows in run.results:
        assert rows.dtype == dtype
        assert torch.equal(rows.to(torch.float32), expected.to(dtype).to(torch.float32))
    # A rank without rows calls like any other.
    assert len(set(run.ledgers)) == 1
    assert [call.site for call in run.ledgers[0]] == ["rows"]


@pytest.mark.gloo
@pytest.mark.parametrize("counts", COUNTS)
def test_rows_are_the_same_bytes_in_both_worlds(gloo_world: Worlds, counts: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        ours = World.lockstep(3).execute(rows_of_all, counts, dtype)
        theirs = gloo_world(3).execute(rows_of_all, counts, dtype)
        assert ours.ledgers == theirs.ledgers
        for left, right in zip(ours.results, theirs.results, strict=True):
            assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.gloo
def test_what_a_watcher_raises_is_raised_as_it_is(gloo_world: Worlds) -> None:
    def watch(rank: int, call: Call) -> None:
        raise BrokenPipeError("watcher")

    for world in (World.lockstep(2), gloo_world(2)):
        with pytest.raises(BrokenPipeError, match="watcher"):
            world.execute(gather_sites, [("view", "index")] * 2, watch=watch)
        assert world.run(who) == [(0, 2, 0, 2), (1, 2, 1, 2)]


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
    assert set(kinds) == {"lockstep", "lockstep-cuda", "gloo", "nccl", "torchrun"}
    for entry in kinds.values():
        assert entry.available == (entry.largest > 0)
        assert entry.note
    assert World.lockstep(kinds["lockstep"].largest).size == kinds["lockstep"].largest


@pytest.mark.parametrize(
    "kind",
    [
        RunFailed,
        RankFailed,
        Deadlock,
        Diverged,
        TimedOut,
        InfrastructureFailed,
        WorldUnavailable,
        Nondeterministic,
    ],
)
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
