"""Hunting for histories that do not hold: batches of a state machine, until a budget is spent.

A batch is one run of Hypothesis and ends at the first finding, which is made small
(:mod:`properties.shrinking`) and known from then on: later batches pass over it, and look for others.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import seed as seeded
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test
from msgspec.structs import replace

from properties.machine import LAWS, STEPS, Broken, HistoryMachine, Stopped
from properties.rehearsal import Rehearsal
from properties.shrinking import MOST_TRIES, renamed, shrunk
from refmodel.errors import Finding, InvalidInput
from refmodel.laws import LAWS as CONTRACT
from sim.gate.histories import HistoryVerdict, try_history
from sim.gate.judge import INFRASTRUCTURE
from sim.gate.runs import Worlds
from sim.gate.setting import Setting
from sim.histories.history import History
from sim.histories.writing import history_file
from sim.kernels.loading import Named
from sim.kernels.uses import NO_USES, Uses, sum_of
from sim.world import World

BATCH = 50  # histories that a batch may take
TRIES = 3  # plays of a history that is made smaller: what broke may not be deterministic
MOST_PLAYED = 250  # histories that ranks play to make one smaller which only they can judge
BUDGETS = {"dev": 100, "ci": 300, "nightly": 20_000}  # histories of a campaign, by profile

Key = tuple[str, str]  # law, and what broke without its numbers


class Stop(Protocol):
    """Says when to end: an event of threads or of processes."""

    def is_set(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Found:
    """One way in which histories fail, at its smallest."""

    history: History
    finding: Finding
    seed: int  # of the schedule
    world: str  # kind
    by_ranks: bool  # the gate shows it too; else only the rehearsal does
    kernels: Named | None = None  # that stood in the place of the reference

    @property
    def key(self) -> Key:
        return key_of(self.finding)

    @property
    def file_name(self) -> str:
        """``l3-free-pages.yaml``"""
        return re.sub(r"[^a-z0-9]+", "-", " ".join(self.key).lower()).strip("-")[:60] + ".yaml"

    def replay(self, folder: Path) -> str:
        """The line that shows it again."""
        file = folder / self.file_name
        if not self.by_ranks:
            return f"cpkv fuzz --replay {file}"
        setting = Setting(seed=self.seed, kernels=self.kernels)
        return f"cpkv gate {file} --world {self.world}:{self.history.world_size} {setting.options}"


@dataclass(slots=True)
class Tally:
    """What batches did, added up."""

    histories: int = 0
    steps: int = 0
    marks: Counter[str] = field(default_factory=Counter)  # histories that reached each
    found: dict[Key, Found] = field(default_factory=dict)
    uses: Uses = NO_USES  # of kernels

    def add(self, other: Tally) -> None:
        self.histories += other.histories
        self.uses = sum_of([self.uses, other.uses])
        self.steps += other.steps
        self.marks += other.marks
        for key, found in other.found.items():
            known = self.found.get(key)
            if known is None or len(found.history.history) < len(known.history.history):
                self.found[key] = found


def key_of(finding: Finding) -> Key:
    """Findings alike but for numbers and ranks are one."""
    what = re.sub(r", on ranks .*", "", finding.what)
    return finding.law, re.sub(r"\d+", "n", what)


@dataclass(frozen=True, slots=True)
class Batch:
    """One run of Hypothesis."""

    seed: int
    examples: int
    world: str = "lockstep"
    known: Collection[Key] = ()
    database: Path | None = None
    first: bool = False  # of its campaign: begins with what the database has
    kernels: Named | None = None


def run_batch(batch: Batch, stop: Stop) -> Tally:
    """Draw histories until one does not hold in a way that is not known, or ``stop`` is set."""
    tally, broken = Tally(), list[Broken]()
    with Worlds(Setting(kernels=batch.kernels)) as worlds:

        class Machine(HistoryMachine):
            def is_over(self) -> bool:
                return stop.is_set()

            def judge(self, rehearsal: Rehearsal, seed: int) -> None:
                verdict = _play(rehearsal, batch.world, seed, worlds)
                findings = verdict.findings or tuple(rehearsal.findings)
                tally.uses = sum_of([tally.uses, verdict.uses])
                tally.histories += 1
                tally.steps += len(rehearsal.steps)
                tally.marks.update(rehearsal.marks)
                if findings and key_of(findings[0]) not in batch.known:
                    broken.append(Broken(rehearsal.history, findings, seed))
                    raise broken[-1]

        # Flaky: it held when Hypothesis tried it again, as an engine that is not deterministic may.
        with suppress(Stopped, Broken, Flaky):
            run_state_machine_as_test(seeded(batch.seed)(Machine), settings=_settings(batch))
        if broken:
            found = _smallest(broken[0], batch, worlds)
            tally.found[found.key] = found
    return tally


def _settings(batch: Batch) -> settings:
    # Without Hypothesis's own shrinking: a history is made smaller as data. What the database has comes
    # first, once a campaign: a batch that passes over what is known would take it for mended, and delete it.
    phases = [Phase.generate, Phase.target, *([Phase.reuse] if batch.first else [])]
    return settings(
        max_examples=batch.examples,
        stateful_step_count=STEPS,
        deadline=None,
        database=DirectoryBasedExampleDatabase(batch.database) if batch.database else None,
        phases=phases,
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )


def _play(rehearsal: Rehearsal, kind: str, seed: int, worlds: Worlds) -> HistoryVerdict:
    """What the ranks find in a rehearsed history."""
    size = rehearsal.setting.world_size
    if kind != "lockstep":
        return try_history(worlds.get(kind, size), rehearsal.history, worlds.setting)
    with World.lockstep(size, seed=seed) as world:
        return try_history(world, rehearsal.history, worlds.setting)


def rehearsed(history: History) -> Rehearsal:
    """A history rehearsed up to the first step that does not hold."""
    rehearsal = Rehearsal(replace(history, history=[]))
    for step in history.history:
        rehearsal.step(step)
        if rehearsal.findings:
            break
    return rehearsal


def _smallest(broken: Broken, batch: Batch, worlds: Worlds) -> Found:
    """The smallest history that fails in a way not known yet."""
    by_rehearsal = bool(rehearsed(broken.history).findings)

    def fails(history: History) -> bool:
        rehearsal = rehearsed(history)
        # The rehearsal is quick; whether ranks see it too shows at the end.
        findings = rehearsal.findings if by_rehearsal else played(rehearsal)
        return bool(findings) and key_of(findings[0]) not in batch.known

    def played(rehearsal: Rehearsal) -> tuple[Finding, ...]:
        tries = (_play(rehearsal, batch.world, broken.seed, worlds).findings for _ in range(TRIES))
        return next(filter(None, tries), ())

    most_tries = MOST_TRIES if by_rehearsal else MOST_PLAYED
    rehearsal = rehearsed(renamed(shrunk(broken.history, fails, most_tries=most_tries)))
    by_ranks = played(rehearsal)
    finding = [*by_ranks, *rehearsal.findings, *broken.findings][0]
    history = replace(
        rehearsal.history,
        title=f"{finding.law} broke: {finding.what}",
        why=f"Expected {finding.expected}; got {finding.received.partition(chr(10))[0]}.",
        laws=[finding.law] if finding.law in CONTRACT else list(LAWS),
    )
    return Found(history, finding, broken.seed, batch.world, bool(by_ranks), batch.kernels)


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
    database: Path | None = None
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
                known=frozenset(tally.found),
                database=self.database,
                first=number == 0,
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
    """Of each worker: one core, and an interrupt is for the one who started it."""
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _work(batch: Batch) -> Tally:
    return run_batch(batch, _stop)


def _beside(jobs: int, batches: Iterator[Batch], stop: Stop) -> Iterator[Tally]:
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_prepare, initargs=(stop,)) as pool:
        pending: set[Future[Tally]] = set()
        while True:
            while len(pending) < jobs and not stop.is_set() and (batch := next(batches, None)) is not None:
                pending.add(pool.submit(_work, batch))
            if not pending:
                return
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


def write_found(found: Found, folder: Path) -> Path:
    """The history as a file there; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / found.file_name
    file.write_text(history_file(found.history), encoding="utf-8")
    return file


def says_nothing(tally: Tally) -> bool:
    """Whether nothing broke but what ranks run on: that is no verdict."""
    return bool(tally.found) and {law for law, _ in tally.found} == {INFRASTRUCTURE}
