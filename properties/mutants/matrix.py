"""The kill matrix: what catches each mutant, after how many examples.

A mutant is killed when a property that proves one of its laws fails against it. The scenario of its incident,
where there is one, must expose it too.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import pytest
from hypothesis import settings

from properties.catalogued import CATALOGUE
from properties.mutants import MUTANTS, named_mutant
from properties.mutants.mutant import Mutant
from properties.proofs import Proof, all_proofs
from properties.workers import workers
from sim.cases.library import AnyScenario
from sim.gate.record import Entry, entry_of
from sim.gate.runs import run_scenario
from sim.world import World

EXAMPLES = 400  # that a property may take to catch a mutant
CHOICES = 4096  # random bytes that one example is made of


@dataclass(frozen=True, slots=True)
class Kill:
    """What caught a mutant."""

    by: str  # property or scenario
    examples: int
    seconds: float
    error: str  # first line
    entry: Entry | None = None  # of the gate, for a scenario that ran


@dataclass(frozen=True, slots=True)
class Row:
    """One mutant's line of the matrix."""

    mutant: str
    laws: tuple[str, ...]
    source: str
    place: str
    fault: str
    caught: Kill | None  # by a property that proves one of its laws
    exposed: Kill | None  # by the scenario of its incident
    has_scenario: bool  # a scenario names it as its incident

    @property
    def killed(self) -> bool:
        """Caught by a property, and exposed by its scenario if it has one."""
        return self.caught is not None and (self.exposed is not None or not self.has_scenario)


def kill_matrix(mutants: Sequence[Mutant] = MUTANTS, *, jobs: int = 2) -> Iterator[Row]:
    """Try each mutant, ``jobs`` at a time in processes of their own; rows as they come."""
    with workers(jobs, _prepare) as pool:
        for done in as_completed([pool.submit(try_mutant, mutant.id) for mutant in mutants]):
            yield done.result()


def _prepare() -> None:
    """Of each worker: no failing example in the database, as it is none of the reference's."""
    settings.register_profile("mutants", database=None, deadline=None)
    settings.load_profile("mutants")


def try_mutant(mutant_id: str) -> Row:
    """Run what should catch one mutant until something does."""
    mutant = named_mutant(mutant_id)
    proofs = [proof for proof in all_proofs() if set(proof.laws) & set(mutant.laws)]
    scenarios = [s for s in CATALOGUE if s.incident == mutant.id]
    with mutant.in_place():
        by_property = first_kill(proofs)
        by_scenario = next(filter(None, map(_try_scenario, scenarios)), None)
    return Row(
        mutant=mutant.id,
        laws=mutant.laws,
        source=mutant.source,
        place=mutant.place,
        fault=mutant.fault,
        caught=by_property,
        exposed=by_scenario,
        has_scenario=bool(scenarios),
    )


@dataclass(slots=True)
class _Attempt:
    """One property's examples so far, none of which failed."""

    proof: Proof
    rest: Iterator[Callable[[], Any]]
    tried: int = 0
    seconds: float = 0.0

    def more(self, share: int) -> Kill | None:
        """So many more of its examples, as long as there are some."""
        start = time.perf_counter()
        for example in islice(self.rest, share):
            self.tried += 1
            try:
                example()
            except (Exception, pytest.fail.Exception) as error:  # any failure of the property counts
                seconds = self.seconds + time.perf_counter() - start
                return Kill(self.proof.name, self.tried, seconds, _first_line(error))
        self.seconds += time.perf_counter() - start
        return None


def first_kill(proofs: Sequence[Proof], *, most: float = math.inf) -> Kill | None:
    """One example of each property, then two more of each, four more, and so on, ``most`` at a time.

    The right one most often needs few; whichever it is, the others will not have taken many.
    """
    attempts = [_Attempt(proof, _examples(proof)) for proof in proofs]
    share = 1
    while attempts and share <= most:
        for attempt in list(attempts):
            before = attempt.tried
            if (kill := attempt.more(share)) is not None:
                return kill
            if attempt.tried < before + share:
                attempts.remove(attempt)
        share *= 2
    return None


def _examples(proof: Proof) -> Iterator[Callable[[], Any]]:
    """Calls that each run the property once: random choices, or the cases of an enumeration."""
    marks = getattr(proof.test, "pytestmark", ())
    if {"gloo", "nccl"} & {mark.name for mark in marks}:
        return  # its processes would not have the mutant
    if hasattr(proof.test, "hypothesis"):
        yield from _random_examples(proof)
        return
    for mark in marks:
        if mark.name == "parametrize" and mark.args[0] == "grid":
            yield from (partial(proof.test, grid) for grid in mark.args[1])


def _random_examples(proof: Proof) -> Iterator[Callable[[], Any]]:
    source = random.Random(proof.name)
    run_one = proof.test.hypothesis.fuzz_one_input
    for _ in range(EXAMPLES):
        yield partial(run_one, source.randbytes(CHOICES))


def _try_scenario(scenario: AnyScenario) -> Kill | None:
    start = time.perf_counter()
    try:
        with World.lockstep(scenario.world_size) as world:
            outcome = run_scenario(scenario, world)
    except Exception as crash:  # the scenario could not even be worked out
        return Kill(scenario.file, 1, time.perf_counter() - start, _first_line(crash))
    if outcome.held:
        return None
    error = str(outcome.findings[0]).partition("\n")[0]
    return Kill(scenario.file, 1, outcome.seconds, error, entry_of(outcome))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip(": ").partition("\n")[0]
