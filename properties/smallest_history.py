"""The smallest file of a history, and what may happen next in it."""

from __future__ import annotations

from sim.cases.library import parse_scenario
from sim.histories.history import History

SMALLEST = """\
title: Five tokens
why: The smallest history there is.
laws: [L1]
world_size: 2
page_size: 4
pages_per_lane: 3
history:
  - submit: {request: a, tokens: 5}
  - forward: [a]
"""


def parsed(text: str) -> History:
    history = parse_scenario(text, "mine.yaml")
    assert isinstance(history, History)
    return history


def then(*steps: str) -> str:
    """The smallest history, and what happens next."""
    return SMALLEST + "".join(f"  - {step}\n" for step in steps)
