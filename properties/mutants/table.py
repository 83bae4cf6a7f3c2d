"""The kill matrix for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from properties.mutants.matrix import Kill, Row
from sim.report.text import print_failure


def print_matrix(rows: Sequence[Row], console: Console, seconds: float) -> None:
    """One line a mutant: which property caught it, after how many examples and how long; its scenario."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("mutant", "laws", "caught by"):
        table.add_column(name, overflow="fold")
    for name in ("examples", "ms"):
        table.add_column(name, justify="right")
    table.add_column("scenario")
    for row in rows:
        table.add_row(row.mutant, " ".join(row.laws), *_kill_cells(row.caught), _scenario_cell(row))
    console.print(table)
    survivors = [row.mutant for row in rows if not row.killed]
    verdict = f"survived: {', '.join(survivors)}" if survivors else "all killed"
    console.print(f"\n{len(rows)} mutants, {verdict}; {seconds:.1f} s")


def _kill_cells(kill: Kill | None) -> tuple[str, str, str]:
    if kill is None:
        return "SURVIVED", "", ""
    return kill.by, str(kill.examples), f"{kill.seconds * 1000:.0f}"


def _scenario_cell(row: Row) -> str:
    if not row.has_scenario:
        return ""
    return "exposes it" if row.exposed else "BLIND"


def print_rows(rows: Sequence[Row], console: Console) -> None:
    """Mutants one by one: what is wrong, where, what caught it, and what the gate says of its scenario."""
    for row in rows:
        console.print(f"{row.mutant}: {row.fault}", style="bold")
        console.print(f"  takes the place of {row.place}; {row.source}; breaks {', '.join(row.laws)}")
        if row.caught is not None:
            examples = f"{row.caught.examples} example{'s' if row.caught.examples > 1 else ''}"
            console.print(f"  caught by {row.caught.by} after {examples}", soft_wrap=True)
            console.print(f"  {row.caught.error}", soft_wrap=True)
        if row.exposed is not None:
            console.print(f"  exposed by {row.exposed.by}", soft_wrap=True)
        if not row.killed:
            console.print("  SURVIVED")
        console.print()
        if row.exposed is not None and row.exposed.entry is not None:
            print_failure(row.exposed.entry, console)
