"""Worked numbers of a history against the tables that came out (laws L1–L4, G2, G4)."""

from __future__ import annotations

from collections.abc import Iterator

from refmodel.errors import Finding, Where
from sim.engine.tables import Tables
from sim.histories.history import Step

_LAW_OF_FREE_PAGES = {"forward": "L2", "decode": "L2", "evict": "L3"}


def unexpected(tables: Tables, step: Step) -> Iterator[Finding]:
    """Where the tables after a step are not as it states them."""
    for name, stated in step.expect.valid.items():
        valid = str(tables.valid(name)) if name in tables.requests else "none: it has left"
        if valid != str(stated):
            yield Finding(
                _law_of_valid(step),
                "tokens in cache, as the history states them",
                str(stated),
                valid,
                Where(request=name),
            )
    free = list(tables.lanes.all_free())
    if step.expect.free not in (None, free):
        law = _LAW_OF_FREE_PAGES.get(step.name, "L1")
        yield Finding(law, "free pages, as the history states them", str(step.expect.free), str(free))


def _law_of_valid(step: Step) -> str:
    """The length of a hit; how many of a batch went on; how far one request did."""
    if step.forward is None:
        return "L4"
    return "G2" if len(step.forward) > 1 else "G4"
