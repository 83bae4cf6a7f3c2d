"""What one rank called, on all its groups: its ledger (V6), and when each call began and ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from refmodel.collectives import Call
from sim.surface.operations import Operation

# What a rank does instead of an operation: nothing, the same, another, several. It may also raise.
Disturb = Callable[[Operation], Iterable[Operation]]

# Hears of a call.
Listener = Callable[[Call], None]

# By the rank's clock, steps of the schedule or nanoseconds: when a call was issued, and when what it receives
# was there.
Times = tuple[int, int]


class Span(NamedTuple):
    """How long a call took: from issue to the moment when what it receives was there."""

    call: Call
    begin: int  # by the rank's clock: steps of the schedule, or nanoseconds
    end: int


def spans_of(calls: Sequence[Call], times: Sequence[Times]) -> tuple[Span, ...]:
    """Of one rank; ``times`` [calls]."""
    return tuple(Span(call, begin, end) for call, (begin, end) in zip(calls, times, strict=True))


@dataclass(slots=True)
class Recorder:
    """Grows by a call, and its beginning, when it is issued; its end is noted when it is known.

    ``clock`` tells the time, ``disturb`` what the rank suffers; ``listener`` hears of each call before it is
    carried.
    """

    clock: Callable[[], int]
    disturb: Disturb | None = None
    listener: Listener | None = None
    calls: list[Call] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)  # of each call
    ends: list[int | None] = field(default_factory=list)  # of each call

    def renew(self, listener: Listener) -> None:
        """Begin another ledger; this one stays as it is with whoever holds it."""
        self.listener = listener
        self.calls, self.begins, self.ends = [], [], []

    def times(self, until: int | None = None) -> tuple[Times, ...]:
        """Of each call. What nobody has waited for ends as it began; or at ``until``, if the run failed."""
        return tuple(
            (begin, end if end is not None else begin if until is None else until)
            for begin, end in zip(self.begins, self.ends, strict=True)
        )
