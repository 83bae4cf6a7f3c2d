"""The commands of ``cpkv`` that need the properties; they join the program by entry points."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from properties.mutants import MUTANTS, named_mutant
from properties.mutants.matrix import kill_matrix
from properties.mutants.table import print_matrix, print_rows
from properties.proofs import all_proofs
from refmodel.laws import LAWS, Law, law
from sim.gate.record import as_json
from sim.report.console import open_console, ticking

# -- cpkv laws ---------------------------------------------------------------------------------------------


class LawRecord(msgspec.Struct, frozen=True):
    """A law, the properties that prove it, and the mutants that break it."""

    id: str
    statement: str
    home: str
    proofs: list[str]
    mutants: list[str]


def laws(
    law_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="Only this law, in detail.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """List the laws: what each says, which module keeps it, what proves it, which mutants break it.

    **Examples**

    - `cpkv laws`
    - `cpkv laws O5`: its properties and mutants by name
    - `cpkv laws --json`
    """
    chosen = list(LAWS.values()) if law_id is None else [law(law_id.upper())]
    records = law_records(chosen)
    if json:
        typer.echo(as_json(records if law_id is None else records[0]), nl=False)
    elif law_id is None:
        _print_laws(records, open_console())
    else:
        _print_law(records[0], open_console())


def law_records(chosen: Sequence[Law]) -> list[LawRecord]:
    """What is known of some laws."""
    proofs = list(all_proofs())
    return [
        LawRecord(
            id=law.id,
            statement=law.statement,
            home=law.home,
            proofs=[proof.name for proof in proofs if law.id in proof.laws],
            mutants=[mutant.id for mutant in MUTANTS if law.id in mutant.laws],
        )
        for law in chosen
    ]


def _print_laws(records: Sequence[LawRecord], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("law")
    table.add_column("statement", ratio=1)
    table.add_column("kept by", overflow="fold")
    for name in ("proofs", "mutants"):
        table.add_column(name, justify="right")
    for record in records:
        home = record.home.removeprefix("refmodel.")
        proofs, mutants = str(len(record.proofs)), str(len(record.mutants))
        table.add_row(record.id, record.statement, home, proofs, mutants)
    console.print(table)


def _print_law(record: LawRecord, console: Console) -> None:
    console.print(f"{record.id}: {record.statement}", style="bold")
    console.print(f"kept by {record.home}")
    for name, entries in (("proved by", record.proofs), ("broken by", record.mutants)):
        console.print(name if entries else f"{name} nothing yet")
        for entry in entries:
            console.print(f"  {entry}", soft_wrap=True)


# -- cpkv mutants ------------------------------------------------------------------------------------------


def mutants(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]…", help="Only these mutants, in detail.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Mutants tried at a time.")] = os.cpu_count() or 1,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Try every wrong version of the reference: what catches it? One that survives fails.

    **Examples**

    - `cpkv mutants`: the kill matrix
    - `cpkv mutants own-05 view-07`: what is wrong with these, and how the gate reports it
    - `cpkv mutants --json`
    """
    console = open_console()
    chosen = [named_mutant(name) for name in ids] if ids else MUTANTS
    start = time.perf_counter()
    with ticking(console, len(chosen)) as tick:
        rows = []
        for row in kill_matrix(chosen, jobs=jobs):
            tick(row.mutant)
            rows.append(row)
    order = [mutant.id for mutant in chosen]
    rows.sort(key=lambda row: order.index(row.mutant))
    if json:
        typer.echo(as_json(rows), nl=False)
    elif ids:
        print_rows(rows, console)
    else:
        print_matrix(rows, console, time.perf_counter() - start)
    raise typer.Exit(0 if all(row.killed for row in rows) else 1)
