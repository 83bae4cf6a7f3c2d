"""Hunting for histories that do not hold: batches of a machine's examples, until a budget is spent.

A batch is one run of Hypothesis and ends at the first finding, which is made small
(:mod:`properties.found`) and known from then on: later batches pass over it, and look for others.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, Protocol

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import Flaky

from properties.drills import Drill, drill_of, unnoticed
from properties.examples_kept import examples_at
from properties.found import Found, Key, key_of, smallest, undrilled
from properties.machine import Broken, Drawn, aim, histories
from properties.rehearsal import MARKS as REHEARSED
from properties.workers import workers
from refmodel.errors import Finding, InvalidInput
from sim.engine.stale import KINDS
from sim.gate.histories import try_history
from sim.gate.runs import Worlds
from sim.gate.setting import Setting
from sim.gate.verdict import INFRASTRUCTURE, Verdict
from sim.histories.history import History
from sim.kernels.loading import Named
from sim.kernels.uses import NO_USES, Uses, sum_of
from sim.world import World

BATCH = 50  # histories that a batch may take
# A way to fail that takes more steps than a reader likes is looked for again, so many times at most.
SHORT, MOST_TIMES = 8, 4
MARKS = (*REHEARSED, "refused at start", *(f"drill: {kind}" for kind in ("die", *KINDS)))
BUDGETS = {"dev": 100, "ci": 1000, "nightly": 20_000}  # histories of a campaign, by profile


class Stopped(KeyboardInterrupt):
    """No more histories are wanted. Hypothesis lets an interrupt through, and keeps nothing of it."""


class Stop(Protocol):
    """Says when to end: an event of threads or of processes."""

    def is_set(self) -> bool: ...


@dataclass(slots=True)
class Tally:
    """What batches did, added up."""

    histories: int = 0
    lengths: Counter[int] = field(default_factory=Counter)  # steps of a history → histories
    marks: Counter[str] = field(default_factory=Counter)  # histories that reached each
    found: dict[Key, Found] = field(default_factory=dict)
    times: Counter[Key] = field(default_factory=Counter)  # that each was found
    uses: Uses = NO_USES  # of kernels

    def add(self, other: Tally) -> None:
        self.histories += other.histories
        self.uses = sum_of([self.uses, other.uses])
        self.lengths += other.lengths
        self.marks += other.marks
        self.times += Counter(other.found.keys())
        for key, found in other.found.items():
            known = self.found.get(key)
            if known is None or len(found.history.history) < len(known.history.history):
                self.found[key] = found

    @property
    def known(self) -> frozenset[Key]:
        """What need not be found again: what is short, or has stayed long some times."""
        return frozenset(
            key
            for key, found in self.found.items()
            if len(found.history.history) <= SHORT or self.times[key] >= MOST_TIMES
        )

    @property
    def steps(self) -> int:
        return sum(self.lengths.elements())

    @property
    def median_steps(self) -> int:
        """Of a history; 0 if there is none."""
        return median_low(self.lengths.elements()) if self.lengths else 0


@dataclass(frozen=True, slots=True)
class Batch:
    """One run of Hypothesis."""

    seed: int
    examples: int
    world: str = "lockstep"
    known: Collection[Key] = ()
    ranks: int | None = None  # of every service; drawn too if not given
    database: str | None = None  # folder or URL of what failed before
    first: bool = False  # of its campaign: begins with what the database has
    aims: bool = False  # whether it goes after what is rare
    kernels: Named | None = None  # in the place of the reference


def run_batch(batch: Batch, stop: Stop) -> Tally:
    """Draw histories until one does not hold in a way that is not known, or ``stop`` is set."""
    tally, broken = Tally(), list[Broken]()
    with Worlds(Setting(kernels=batch.kernels)) as worlds:

        def judged(drawn: Drawn) -> None:
            if stop.is_set():
                raise Stopped
            rehearsal = drawn.rehearsal
            tally.histories += 1
            tally.lengths[len(drawn.history.history)] += 1
            tally.marks.update(["refused at start"] if drawn.unfit else rehearsal.marks)
            aim(rehearsal)
            verdict = _play(drawn.history, batch.world, drawn.seed, worlds)
            tally.uses = sum_of([tally.uses, verdict.uses])
            findings = verdict.findings or drawn.findings
            if findings and key_of(findings[0]) not in batch.known:
                broken.append(Broken(drawn.history, findings, drawn.seed))
                raise broken[-1]
            if not findings and not drawn.unfit:
                _drill(drawn, verdict.calls, batch, worlds, tally)

        # The seed first: it takes the database from the settings that it finds.
        hunted = seeded(batch.seed)(given(histories(aimed=batch.aims, ranks=batch.ranks))(judged))
        # Flaky: it held when Hypothesis tried it again, as an engine that is not deterministic may.
        with suppress(Stopped, Broken, Flaky):
            _settings(batch)(hunted)()
        if broken:
            seed = broken[0].seed
            found = smallest(
                broken[0],
                batch.world,
                lambda history: _play(history, batch.world, seed, worlds).findings,
                batch.known,
                batch.kernels,
            )
            tally.found[found.key] = found
    return tally


def _drill(drawn: Drawn, calls: int, batch: Batch, worlds: Worlds, tally: Tally) -> None:
    """Now and then play a history that held again, with something wrong: it must be noticed."""
    drill = drill_of(drawn.rehearsal, calls, drawn.luck, batch.world)
    if drill is None:
        return

    def look(history: History, drill: Drill) -> tuple[Finding, ...]:
        with _world(batch.world, history.world_size, drawn.seed, worlds) as world:
            return unnoticed(world, history, drill)

    findings = look(drawn.history, drill)
    tally.marks[f"drill: {drill.kind}"] += 1
    if findings and key_of(findings[0]) not in {*batch.known, *tally.found}:
        broken = Broken(drawn.history, findings, drawn.seed)
        found = undrilled(
            broken,
            drill,
            batch.world,
            lambda history: _play(history, batch.world, drawn.seed, worlds),
            look,
            batch.kernels,
        )
        tally.found[found.key] = found


def _settings(batch: Batch) -> settings:
    # Without Hypothesis's own shrinking: a history is made smaller as data. What the database has comes
    # first, once a campaign: a batch that passes over what is known would take it for mended, and delete it.
    # Aiming makes many alike: a few of the batches do, the others draw freely, and only theirs are kept.
    kept = None if batch.aims else batch.database
    phases = [
        Phase.generate,
        *([Phase.target] if batch.aims else []),
        *([Phase.reuse] if batch.first else []),
    ]
    return settings(
        max_examples=batch.examples,
        deadline=None,
        database=None if kept is None else examples_at(kept),
        phases=phases,
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def _world(kind: str, size: int, seed: int, worlds: Worlds) -> Iterator[World]:
    """A world of its own for a schedule; processes are kept."""
    if kind != "lockstep":
        yield worlds.get(kind, size)
        return
    with World.lockstep(size, seed=seed) as world:
        yield world


def _play(history: History, kind: str, seed: int, worlds: Worlds) -> Verdict[Any]:
    """What the ranks make of a history."""
    with _world(kind, history.world_size, seed, worlds) as world:
        return try_history(world, history, worlds.setting)


def profile() -> str:
    """The profile of Hypothesis that the environment asks for: dev, ci or nightly."""
    name = os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
    if name not in BUDGETS:
        raise InvalidInput("HYPOTHESIS_PROFILE", expected=f"one of {', '.join(BUDGETS)}", received=name)
    return name


@contextmanager
def stopping_at_interrupt() -> Iterator[Any]:
    """Gives the event that ends a hunt. The first Ctrl-C sets it; a second one interrupts as ever."""
    stop = multiprocessing.get_context("forkserver").Event()

    def interrupted(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, before)
        stop.set()

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


# -- a campaign --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Campaign:
    """What to spend, and where. A budget is a number of histories, of seconds, or both."""

    seed: int = 0
    examples: int | None = None
    seconds: float | None = None
    world: str = "lockstep"
    jobs: int = 1
    ranks: int | None = None
    database: str | None = None
    kernels: Named | None = None

    def batches(self, tally: Tally, started: float) -> Iterator[Batch]:
        """One after the other; what is known by then is passed over."""
        number = drawn = 0
        while not self.spent(drawn, started):
            examples = BATCH if self.examples is None else min(BATCH, self.examples - drawn)
            yield Batch(
                seed=(self.seed << 24) + number,
                examples=examples,
                world=self.world,
                known=tally.known,
                ranks=self.ranks,
                database=self.database,
                first=number == 0,
                aims=number % 5 == 4,
                kernels=self.kernels,
            )
            number, drawn = number + 1, drawn + examples

    def spent(self, drawn: int, started: float) -> bool:
        """Whether nothing more is to be begun."""
        over = self.seconds is not None and time.monotonic() - started > self.seconds
        return over or (self.examples is not None and drawn >= self.examples)


def hunt(campaign: Campaign, stop: Any, heard: Callable[[Tally], None]) -> Tally:
    """Run a campaign. ``heard`` is given the sum after every batch; ``stop.set()`` ends it within seconds."""
    total, started = Tally(), time.monotonic()
    batches = campaign.batches(total, started)
    done = _in_turn(batches, stop) if campaign.jobs == 1 else _beside(campaign.jobs, batches, stop)
    for tally in done:
        total.add(tally)
        heard(total)
    return total


def _in_turn(batches: Iterator[Batch], stop: Stop) -> Iterator[Tally]:
    for batch in batches:
        if stop.is_set():
            return
        yield run_batch(batch, stop)


_stop: Stop  # of this process, if it is a worker


def _prepare(stop: Stop) -> None:
    """Of each worker: an interrupt is for the one who started it."""
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _work(batch: Batch) -> Tally:
    return run_batch(batch, _stop)


def _beside(jobs: int, batches: Iterator[Batch], stop: Stop) -> Iterator[Tally]:
    with workers(jobs, _prepare, stop) as pool:
        pending: set[Future[Tally]] = set()
        while True:
            while len(pending) < jobs and not stop.is_set() and (batch := next(batches, None)) is not None:
                pending.add(pool.submit(_work, batch))
            if not pending:
                return
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


def says_nothing(tally: Tally) -> bool:
    """Whether nothing broke but what ranks run on: that is no verdict."""
    return bool(tally.found) and {law for law, _ in tally.found} == {INFRASTRUCTURE}
