"""Schedules: what they choose, and the tokens that choose it again."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from properties.programs import noted_order, one_raises, one_stays_away, rows_of_all, who
from properties.proofs import proves
from properties.test_sequences import Step, perform, plain, sequences
from refmodel.collectives import all_gather_rows
from refmodel.errors import InvalidInput
from sim.failures import Deadlock, Nondeterministic, RankFailed
from sim.lockstep.schedule import Draw, Schedule, in_order, priority_changing, randomly, replay
from sim.world import World

schedules = st.one_of(
    st.just(in_order()),
    st.builds(randomly, st.integers(0, 2**64)),
    st.builds(priority_changing, st.integers(0, 2**64), depth=st.integers(1, 5), steps=st.integers(5, 50)),
)


def order_of(size: int, seed: int, steps: int = 6) -> list[tuple[int, int]]:
    order: list[tuple[int, int]] = []
    World.lockstep(size, seed=seed).run(noted_order, order, steps)
    return order


@given(size=st.integers(1, 6), seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=30)
def test_one_seed_is_one_schedule(size: int, seed: int) -> None:
    assert order_of(size, seed) == order_of(size, seed)


def test_seeds_differ_in_schedule_and_agree_in_results() -> None:
    orders = {tuple(order_of(4, seed)) for seed in range(10)}
    assert len(orders) == 10
    results = [
        World.lockstep(4, seed=seed).run(rows_of_all, (1, 2, 0, 3), torch.float32)[0] for seed in range(10)
    ]
    assert all(torch.equal(result, results[0]) for result in results)


class Watched:
    """A schedule that notes what it may choose from."""

    def __init__(self, seed: int) -> None:
        self.seen: list[tuple[tuple[int, ...], int]] = []
        self._seed = seed

    def draw(self, size: int, program: str) -> Draw:
        choose = randomly(self._seed).draw(size, program)

        def note(options: Sequence[int], first: int) -> int:
            self.seen.append((tuple(options), first))
            return choose(options, first)

        return note


def in_pairs_and_together(group: dist.ProcessGroup, rounds: int) -> None:
    """So that ranks come to the meeting of all in other orders than their own."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, group.size(), 2)]
    own = group.rank() // 2
    for turn in range(rounds):
        if own != turn % len(pairs):
            dist.barrier(pairs[own])
        dist.barrier(group)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=20)
def test_a_schedule_chooses_from_ranks_in_order(seed: int) -> None:
    watched = Watched(seed)
    World.lockstep(6, schedule=watched).run(in_pairs_and_together, 4)
    assert any(len(options) == 6 for options, _ in watched.seen)
    for options, first in watched.seen:
        assert list(options) == sorted(set(options))
        assert 0 <= first <= len(options)


def test_any_rank_may_be_first_in_any_step() -> None:
    firsts = {
        (order[step * 3][1], step) for seed in range(40) for order in [order_of(3, seed)] for step in range(3)
    }
    assert firsts == {(rank, step) for rank in range(3) for step in range(3)}


@proves("V6")
@given(size=st.integers(1, 4), sequence=sequences, schedule=schedules)
@settings(deadline=None)
def test_a_token_replays_its_run(size: int, sequence: list[Step], schedule: Schedule) -> None:
    run = World.lockstep(size, schedule=schedule).execute(perform, sequence)
    again = World.lockstep(size, schedule=replay(run.schedule)).execute(perform, sequence)
    assert plain(again.results) == plain(run.results)
    assert (again.ledgers, again.spans, again.schedule) == (run.ledgers, run.spans, run.schedule)


def test_in_order_ranks_follow_each_other() -> None:
    order: list[tuple[int, int]] = []
    run = World.lockstep(4, schedule=in_order()).execute(noted_order, order, 3)
    assert order[:4] == [(0, rank) for rank in range(4)]
    assert order[4:8] == [(1, rank) for rank in range(4)]
    # It chose what is next in order throughout: nothing to remember but how often.
    assert len(run.schedule) < 20


def test_a_failed_run_can_be_replayed_too() -> None:
    for program, kind in ((one_raises, RankFailed), (one_stays_away, Deadlock)):
        with pytest.raises(kind) as first:
            World.lockstep(4, seed=5).run(program, 2)
        assert f"schedule: {first.value.schedule}" in str(first.value)
        with pytest.raises(kind) as second:
            World.lockstep(4, schedule=replay(first.value.schedule)).run(program, 2)
        assert str(second.value) == str(first.value)


def token(size: int, program: Callable[..., object], *args: object) -> str:
    return World.lockstep(size, seed=9).execute(program, *args).schedule


def test_a_token_of_something_else_is_refused() -> None:
    own = token(3, noted_order, [], 4)
    for text in ("", "?", "AAAA", own[:7], token(4, noted_order, [], 4), token(3, who)):
        with pytest.raises(InvalidInput, match="schedule token"):
            World.lockstep(3, schedule=replay(text)).run(noted_order, [], 4)
    for steps in (1, 3, 5, 30):  # the same program, and not the same choices
        with pytest.raises(InvalidInput, match="schedule token"):
            World.lockstep(3, schedule=replay(own)).run(noted_order, [], steps)
    World.lockstep(3, schedule=replay(own)).run(noted_order, [], 4)


def overwrites_too_early(group: dist.ProcessGroup) -> int:
    """What is sent is changed before it is waited for: who comes last decides what the others get."""
    mine = torch.tensor([group.rank() + 1])
    parts = [torch.zeros_like(mine) for _ in range(group.size())]
    work = dist.all_gather(parts, mine, async_op=True)
    mine.zero_()
    work.wait()
    return int(sum(parts))


def test_schedules_bring_out_races() -> None:
    found = {World.lockstep(3, seed=seed).run(overwrites_too_early)[0] for seed in range(20)}
    assert len(found) > 1


def test_priorities_keep_a_rank_back_for_long() -> None:
    """With equal chances the last of four ranks is hardly ever last six times; with priorities, often."""

    def all_last(schedule: Schedule) -> bool:
        order: list[tuple[int, int]] = []
        World.lockstep(4, schedule=schedule).run(noted_order, order, 6)
        lasts = {[rank for step, rank in order if step == number][-1] for number in range(6)}
        return lasts == {3}

    found = Counter[str]()
    for seed in range(40):
        found["random"] += all_last(randomly(seed))
        found["priorities"] += all_last(priority_changing(seed, depth=1))
    assert found["random"] == 0
    assert found["priorities"] >= 4


def test_priorities_without_meaning_are_refused() -> None:
    for depth, steps in ((0, 5), (6, 5)):
        with pytest.raises(InvalidInput, match="changing priorities"):
            priority_changing(1, depth=depth, steps=steps)


# -- self-check --------------------------------------------------------------------------------------------


def draws(source: Callable[[], float]) -> Callable[[dist.ProcessGroup], None]:
    def program(group: dist.ProcessGroup) -> None:
        all_gather_rows(torch.zeros(1, 1), [1] * group.size(), group=group, site="before")
        rows = torch.tensor([[source() if group.rank() == 1 else 0.5]], dtype=torch.float64)
        all_gather_rows(rows, [1] * group.size(), group=group, site="after")

    return program


@pytest.mark.parametrize("source", [random.random, time.monotonic], ids=["random", "time"])
def test_what_no_schedule_controls_is_named(source: Callable[[], float]) -> None:
    with pytest.raises(Nondeterministic, match=r"#1 after: .*, got other contents when replayed") as caught:
        World.lockstep(3).self_check(draws(source))
    assert (caught.value.rank, caught.value.where.site) == (1, "after")


def test_another_number_of_calls_is_named() -> None:
    lengths = iter([2, 2, 3, 3])

    def program(group: dist.ProcessGroup) -> None:
        for place in range(next(lengths)):
            all_gather_rows(torch.zeros(1, 1), [1] * 2, group=group, site=f"step {place}")

    with pytest.raises(Nondeterministic, match="expected no more calls, got #2 step 2") as caught:
        World.lockstep(2).self_check(program)
    assert caught.value.where.site == "step 2"


def test_another_result_is_named() -> None:
    results = iter([1, 2, 1, 3])

    def program(group: dist.ProcessGroup) -> dict[str, list[int]]:
        return {"of": [next(results)]}

    with pytest.raises(Nondeterministic, match="results"):
        World.lockstep(2, schedule=in_order()).self_check(program)


def seeded_in_each_rank(group: dist.ProcessGroup) -> float:
    torch.manual_seed(group.rank())
    dist.barrier()
    return torch.rand(()).item()


def test_what_the_schedule_controls_passes() -> None:
    run = World.lockstep(3, seed=4).self_check(rows_of_all, (1, 0, 2), torch.float32)
    assert run.ledgers == World.lockstep(3, seed=4).execute(rows_of_all, (1, 0, 2), torch.float32).ledgers
    World.lockstep(3).self_check(seeded_in_each_rank)


def test_each_rank_has_random_numbers_of_its_own() -> None:
    own = torch.random.get_rng_state()
    expected = [torch.rand((), generator=torch.Generator().manual_seed(rank)).item() for rank in range(3)]
    for seed in range(4):
        assert World.lockstep(3, seed=seed).run(seeded_in_each_rank) == expected
    assert torch.equal(torch.random.get_rng_state(), own)


def test_a_self_check_is_of_lockstep() -> None:
    with pytest.raises(InvalidInput, match="self-check"):
        World.gloo(2).self_check(who)
