"""How rank 0 judges a world that was started, without processes."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from sim.failures import InfrastructureFailed, RankFailed, TimedOut
from sim.processes.messages import Alive, Failed, Returned
from sim.processes.parcel import unpack
from sim.torchrun import judge as judging
from sim.torchrun.judge import Judge
from sim.torchrun.letters import Begins, Done, Leaves, Read
from sim.torchrun.watcher import Watcher


class Clock:
    """Time that passes when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(judging, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Court:
    """A judge of three ranks, all of which have begun."""

    def __init__(self, clock: Clock, begun: int = 3) -> None:
        self.heard: dict[int, float] = {}
        self.clock = clock
        self.judge = Judge("torchrun:3", 3, timeout=10, heard=self.heard)
        for rank in range(begun):
            self.say(rank, Begins("p"))

    def say(self, rank: int, message: Any) -> None:
        self.heard[rank] = self.clock.now
        self.judge.hear(rank, message)

    def wait(self, seconds: float, *alive: int) -> Any:
        """The verdict after that time, in which only these ranks were heard."""
        for _ in range(round(seconds * 10)):
            self.clock.now += 0.1
            for rank in alive:
                self.say(rank, Alive("ring.py:88"))
            verdict = self.judge.verdict()
            if verdict is not None:
                return verdict
        return None


LOST = Failed("", "RuntimeError: Connection closed by peer", "", 0.0, lost_connection=True)


def test_a_silent_rank_is_lost_soon_if_others_miss_it(clock: Clock) -> None:
    court = Court(clock)
    assert court.wait(4, 0, 1) is None
    court.say(0, LOST)
    verdict = court.wait(0.5, 0, 1)
    assert isinstance(verdict, RankFailed)
    assert verdict.rank == 2


def test_a_silent_rank_is_lost_in_the_end(clock: Clock) -> None:
    court = Court(clock)
    verdict = court.wait(6, 0, 1)
    assert isinstance(verdict, RankFailed)
    assert "not heard of for" in str(verdict)


def test_a_launcher_that_ends_ranks_knows_of_a_death(clock: Clock) -> None:
    court = Court(clock)
    court.say(0, Leaves())
    verdict = court.wait(2, 0, 1)
    assert isinstance(verdict, RankFailed)
    assert verdict.rank == 2


def test_connections_that_break_between_living_ranks_are_the_networks(clock: Clock) -> None:
    court = Court(clock)
    court.say(1, LOST)
    verdict = court.wait(6, 0, 1, 2)
    assert isinstance(verdict, InfrastructureFailed)


def test_a_rank_that_was_lost_before_it_began_is_no_fault_of_the_program(clock: Clock) -> None:
    court = Court(clock, begun=2)
    court.heard[2] = clock.now  # in an earlier run
    verdict = court.wait(6, 0, 1)
    assert isinstance(verdict, InfrastructureFailed)
    assert verdict.rank == 2


def test_a_rank_that_never_comes_is_waited_for_and_then_named(clock: Clock) -> None:
    court = Court(clock, begun=2)
    assert court.wait(judging.START_SECONDS - 1, 0, 1) is None
    verdict = court.wait(2, 0, 1)
    assert isinstance(verdict, TimedOut)
    assert "nothing from rank 2" in str(verdict)


def test_time_counts_from_when_the_last_rank_begins(clock: Clock) -> None:
    court = Court(clock, begun=2)
    assert court.wait(9, 0, 1) is None
    court.say(2, Begins("p"))
    assert court.wait(9, 0, 1, 2) is None
    assert isinstance(court.wait(2, 0, 1, 2), TimedOut)


def test_a_verdict_is_done_when_all_have_returned(clock: Clock) -> None:
    court = Court(clock)
    for rank in range(3):
        assert court.judge.verdict() is None
        court.say(rank, Returned(b"", ()))
    assert court.judge.verdict() == Done([b""] * 3, [[], [], []], [()] * 3)
    for rank in range(3):
        assert not court.judge.is_known_to_all()
        court.say(rank, Read())
    assert court.judge.is_known_to_all()


class SlowPost:
    """A store that takes its time."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, letter: bytes) -> None:
        time.sleep(0.1)
        self.sent.append(letter)

    def announced(self, name: str) -> None:
        """Nothing yet."""

    def beats(self) -> int:
        return 0


def test_what_is_told_is_on_its_way_before_the_rank_goes_on() -> None:
    """A program may end its process at once: it must not seem to have died before it began."""
    post: Any = SlowPost()
    watcher = Watcher(post, 1, 2, "torchrun:2", 5.0)
    watcher.begin(1, str)
    watcher.tell(1, Begins("p"))
    assert (1, Begins("p")) in [message for letter in post.sent for message in unpack(letter)]
    watcher.close()
