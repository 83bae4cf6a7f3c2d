"""All cases of one operation: corners, then drawn ones; what fails is made small."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hypothesis import Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import Flaky, Unsatisfiable

from properties.kernels.cases.case import Case
from properties.kernels.handling import Handling, all_handlings, few_handlings, handlings
from properties.kernels.selection import QUIET, cases_of, corners, size_of, untried
from properties.kernels.trial import OTHER_VALUES
from refmodel.errors import Finding
from refmodel.ops.declare import Capabilities
from sim.kernels.candidate import Candidate

_SMALLER_SECONDS = 10.0  # for making a failure smaller

Attempt = Callable[[Case, Handling], Finding | None]


@dataclass(frozen=True, slots=True)
class Counterexample:
    """One input that a candidate fails."""

    case: Case
    handling: Handling
    finding: Finding
    steady: bool = True  # it fails whenever it is tried

    @property
    def rank(self) -> tuple[object, ...]:
        """Smaller is better to read."""
        return *size_of(self.case)[:2], self.handling.oddness, repr(self.case)


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of a candidate."""

    cases: int  # different ones
    attempts: int  # cases and ways of handing them over
    counterexample: Counterexample | None = None
    untried: str = ""  # of what is declared


@dataclass
class _Broke(Exception):
    """Hypothesis is to know that this example fails."""


@dataclass
class Search:
    """A candidate and its cases; ``attempt`` tries one of them."""

    candidate: Candidate
    kind: type[Case]
    attempt: Attempt
    examples: int
    seed: int
    _cases: set[Case] = field(default_factory=set)
    _attempts: int = 0

    @property
    def capabilities(self) -> Capabilities:
        return self.candidate.capabilities

    def run(self) -> Tried:
        """Corners in a few ways each, then drawn cases in any way, until one fails."""
        found = next(self._corners(), None)
        if found is not None:
            smaller = self._drawn(max(self.examples, 50), found.finding.law)
            found = min(filter(None, (found, smaller)), key=lambda one: one.rank)
        elif self.examples:
            found = self._drawn(self.examples)
        if found is not None:
            found = self._plainest(found)
        return Tried(len(self._cases), self._attempts, found, untried(self.capabilities, self._cases))

    def replay(self, case: Case) -> Tried:
        """One case in every way that there is."""
        tried = (self._try(case, way) for way in all_handlings(self.candidate))
        return Tried(1, self._attempts, next(filter(None, tried), None))

    def _try(self, case: Case, handling: Handling) -> Counterexample | None:
        self._cases.add(case)
        self._attempts += 1
        finding = self.attempt(case, handling)
        return None if finding is None else Counterexample(case, handling, finding)

    def _corners(self) -> Iterator[Counterexample]:
        cases = corners(self.kind, self.capabilities)
        for way in few_handlings(self.candidate):
            for case in cases:
                if found := self._try(case, way):
                    yield found

    def _drawn(self, examples: int, like: str = "") -> Counterexample | None:
        """The smallest failure that Hypothesis finds; only those of the kind ``like``, if that is given."""
        found: list[Counterexample] = []
        until = float("inf")

        @seeded(self.seed)
        @settings(QUIET, max_examples=examples, phases=[Phase.generate, Phase.shrink], print_blob=False)
        @given(cases_of(self.kind, self.capabilities), handlings(self.candidate))
        def holds(case: Case, handling: Handling) -> None:
            nonlocal until
            if time.monotonic() > until:
                return
            one = self._try(case, handling)
            wanted = like or (found[0].finding.law if found else "")  # not to slip to another fault
            if one is None or wanted not in ("", one.finding.law):
                return
            found.append(one)
            until = min(until, time.monotonic() + _SMALLER_SECONDS)
            raise _Broke

        with suppress(_Broke, Flaky, Unsatisfiable):
            holds()
        return min(found, key=lambda one: one.rank, default=None)

    def _plainest(self, found: Counterexample) -> Counterexample:
        """The same case, in the plainest way in which it fails; and whether it fails again."""
        for way in all_handlings(self.candidate):
            if way.oddness > found.handling.oddness:
                break
            again = self._try(found.case, way)
            if again is not None and again.finding.law == found.finding.law:
                return self._at_first(again)
        return Counterexample(found.case, found.handling, found.finding, steady=False)

    def _at_first(self, found: Counterexample) -> Counterexample:
        """What fails only at the second call, with other values: those values alone, if they fail at once."""
        if not found.finding.what.endswith(OTHER_VALUES):
            return found
        other = self._try(replace(found.case, seed=found.case.seed + 1), found.handling)
        at_once = other is not None and not other.finding.what.endswith(OTHER_VALUES)
        return other if other is not None and at_once and other.finding.law == found.finding.law else found
