"""``cpkv worlds``: what this machine can run."""

from __future__ import annotations

from typing import Annotated

import typer
from rich import box
from rich.table import Table

from sim.gate.record import as_json
from sim.machine import available
from sim.report.console import open_console


def worlds(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the kinds of world this machine can run, and for the others what is missing.

    A world is what ranks run on: `cpkv gate --world KIND` or `--world KIND:RANKS`.

    **Examples**

    - `cpkv worlds`
    - `cpkv worlds --json`
    """
    if json:
        typer.echo(as_json(available()), nl=False)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("world", "available", "ranks", "note"):
        table.add_column(name)
    for kind in available():
        ranks = f"1 … {kind.largest}" if kind.available else ""
        table.add_row(kind.kind, "yes" if kind.available else "no", ranks, kind.note)
    open_console().print(table)
