"""Which of the places that hurt this process has reached. Properties note every plan they try."""

from __future__ import annotations

from refmodel.layout.plan import Plan
from refmodel.storage.write import WriteVerdict
from sim.gate.marks import marks_of

marks: set[str] = set()


def note(plan: Plan, verdict: WriteVerdict | None = None) -> None:
    """Remember the marks a plan reaches."""
    marks.update(marks_of(plan, verdict))
