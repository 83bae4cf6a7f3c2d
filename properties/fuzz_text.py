"""A hunt in words: how far it is, what it found, and the line at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from properties.found import Found, write_found
from properties.fuzz import MARKS, Tally
from sim.gate.record import broken
from sim.report.text import BROKE, HELD, finding_lines, headline, print_pairs

_QUIET_SECONDS = 5.0  # between two lines of progress


def following(console: Console, out: Path, start: float) -> Callable[[Tally], None]:
    """Hears of every batch: writes what is new to a file at once, and says now and then how far it is."""
    sizes: dict[str, int] = {}  # of the histories written, by file name
    spoken = start

    def heard(tally: Tally) -> None:
        nonlocal spoken
        for found in tally.found.values():
            steps = len(found.history.history)
            if steps < sizes.get(found.file_name, steps + 1):
                sizes[found.file_name] = steps
                write_found(found, out)
                print_found(found, out, console)
        if time.perf_counter() - spoken > _QUIET_SECONDS:
            spoken = time.perf_counter()
            console.print(progress_line(tally, spoken - start), soft_wrap=True)

    return heard


def progress_line(tally: Tally, seconds: float) -> str:
    """``1,200 histories and 15,000 steps, 50 and 625 a second; eviction 420, refused 800, …``"""
    reached = ", ".join(f"{mark} {tally.marks[mark]:,}" for mark in MARKS if tally.marks[mark])
    plural = "y" if tally.histories == 1 else "ies"
    done = f"{tally.histories:,} histor{plural} and {tally.steps:,} steps"
    rates = " and ".join(f"{count / max(seconds, 1e-9):,.1f}" for count in (tally.histories, tally.steps))
    return f"{done}, {rates} a second; {reached or 'nothing reached'}"


def print_found(found: Found, out: Path, console: Console) -> None:
    """What broke, where, and how to see it again."""
    record = broken(found.finding)
    console.print(Text(headline(record), BROKE[1]))
    steps = len(found.history.history)
    pairs = [*finding_lines(record), ("history", f"{out / found.file_name}, {steps} steps")]
    print_pairs([*pairs, ("replay", found.replay(out))], console)
    console.print()


def print_summary(tally: Tally, console: Console, seconds: float, *, stopped: bool) -> None:
    """The marks, and one line at the end."""
    console.print(progress_line(tally, seconds), soft_wrap=True)
    missing = [mark for mark in MARKS if not tally.marks[mark]]
    if missing:
        console.print(f"not reached: {', '.join(missing)}", soft_wrap=True)
    word, style = BROKE if tally.found else HELD
    ways = f", {len(tally.found)} in ways of their own" if tally.found else ""
    early = ", ended early" if stopped else ""
    lengths = f"{tally.steps:,} steps, {tally.median_steps} in the median"
    text = f": {tally.histories:,} histories{ways}{early}; {lengths}, {seconds:.1f} s"
    console.print(Text.assemble((f"fuzz {word}", style), text), soft_wrap=True)
