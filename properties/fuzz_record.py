"""A hunt as a record, for machines to read."""

from __future__ import annotations

from pathlib import Path

import msgspec

from properties.found import Found
from properties.fuzz import MARKS, Tally
from sim.gate.record import Broken, broken


class FoundRecord(msgspec.Struct, frozen=True):
    """One way in which histories failed."""

    finding: Broken
    file: str
    steps: int
    drill: str  # what went unnoticed in a history that holds by itself; empty most of the time
    replay: str  # the command that shows it again


class Hunt(msgspec.Struct, frozen=True):
    """What was hunted, and what was found."""

    histories: int
    steps: int
    median_steps: int
    seconds: float
    ended_early: bool
    marks: dict[str, int]  # histories that reached each
    missing: list[str]  # marks that none reached
    found: list[FoundRecord]
    held: bool


def record_of(tally: Tally, seconds: float, out: Path, *, stopped: bool) -> Hunt:
    """``out``: the folder that files of what was found are in."""
    return Hunt(
        histories=tally.histories,
        steps=tally.steps,
        median_steps=tally.median_steps,
        seconds=seconds,
        ended_early=stopped,
        marks={mark: tally.marks[mark] for mark in MARKS if tally.marks[mark]},
        missing=[mark for mark in MARKS if not tally.marks[mark]],
        found=[_record(found, out) for found in tally.found.values()],
        held=not tally.found,
    )


def _record(found: Found, out: Path) -> FoundRecord:
    return FoundRecord(
        finding=broken(found.finding),
        file=str(out / found.file_name),
        steps=len(found.history.history),
        drill=found.drill,
        replay=found.replay(out),
    )
