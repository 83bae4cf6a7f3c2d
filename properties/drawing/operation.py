"""A kind of step in a history that is being drawn, or several that go together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from properties.drawing.choices import Choices
from properties.rehearsal.model import Model
from sim.histories.history import Step


@dataclass(frozen=True, slots=True)
class Operation:
    """How often it is drawn, when it can be, and what it is."""

    weight: int
    when_crowded: int  # its weight after a step that found no pages
    possible: Callable[[Model], object]
    steps: Callable[[Choices, Model], Iterable[Step]]  # each is drawn from what the one before has left
