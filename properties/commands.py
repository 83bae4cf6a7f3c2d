"""The commands of ``cpkv`` that need the properties; they join the program by entry points."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from properties.drills import check_drill, parse_drill, unnoticed
from properties.examples_kept import examples_at
from properties.found import rehearsed
from properties.fuzz import BUDGETS, Campaign, hunt, profile, says_nothing, stopping_at_interrupt
from properties.fuzz_record import record_of
from properties.fuzz_text import following, print_summary
from properties.mutants import MUTANTS, named_mutant
from properties.mutants.matrix import kill_matrix
from properties.mutants.table import print_matrix, print_rows
from properties.proofs import all_proofs
from refmodel.errors import InvalidInput
from refmodel.laws import LAWS, Law, law
from sim.cases.library import load_scenario
from sim.gate.histories import try_history
from sim.gate.kernels import kernel_uses
from sim.gate.record import as_json
from sim.gate.runs import Worlds
from sim.gate.setting import Setting
from sim.histories.history import History
from sim.kernels.loading import named
from sim.report.console import open_console, ticking
from sim.report.files import check_writable
from sim.report.text import print_kernels

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


# -- cpkv fuzz ---------------------------------------------------------------------------------------------


def fuzz(
    minutes: Annotated[float | None, typer.Option(min=0, help="Stop after so long.")] = None,
    examples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Stop after so many histories.",
            show_default="without --minutes: " + ", ".join(f"{n} ({name})" for name, n in BUDGETS.items()),
        ),
    ] = None,
    world: Annotated[str, typer.Option(help="Kind of world: lockstep or gloo.")] = "lockstep",
    seed: Annotated[
        int, typer.Option(min=0, help="Other seeds draw other histories; of --replay, that of the schedule.")
    ] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that hunt beside each other.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for what is found.")] = Path("found"),
    cp: Annotated[int | None, typer.Option(min=1, help="Ranks of every history; drawn if not given.")] = None,
    database: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|URL",
            help="Hypothesis's examples, in a folder or at redis://host: what failed is tried first.",
        ),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Rehearse and play this history instead of drawing any.")
    ] = None,
    kernels: Annotated[
        str | None,
        typer.Option(metavar="TARGET", help="Kernels to put in the place of the reference."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the numbers and what was found there.")
    ] = None,
    drill: Annotated[
        str, typer.Option(help='With --replay: what must be noticed, such as "unheard rank=1 step=7".')
    ] = "",
) -> None:
    """Draw serving histories until one does not hold; make it small, and write it as a file.

    Ctrl-C ends it early with all that was found. Exit code 0: all held; 1: some did not, and each ends in the
    line that replays it; 2: nothing can be said.

    **Examples**

    - `cpkv fuzz`: as many histories as the profile says (HYPOTHESIS_PROFILE: dev, ci or nightly)
    - `cpkv fuzz --minutes 30 --jobs 8 --seed 7`
    - `cpkv fuzz --world gloo --examples 50`: on processes
    - `cpkv fuzz --kernels my_kernels.py`: with kernels of your own in the place of the reference
    - `cpkv fuzz --database shared/examples`: what failed here before, or on another machine, comes first
    """
    if world not in ("lockstep", "gloo"):
        raise InvalidInput("--world", expected="lockstep or gloo", received=world)
    console = open_console()
    target = None if kernels is None else named(kernels)
    if replay is not None:
        _replay(replay, world, Setting(seed=seed, kernels=target), drill, console)
    if drill:
        raise InvalidInput("--drill", expected="a history to replay", received="none", fix="Add --replay.")
    check_writable(json=json)
    if minutes is None and examples is None:
        examples = BUDGETS[profile()]
    seconds = None if minutes is None else 60 * minutes
    if database is not None:
        examples_at(database)  # a server that is not there is refused before anything is drawn
    campaign = Campaign(seed, examples, seconds, world, jobs, cp, database, target)
    start = time.perf_counter()
    with stopping_at_interrupt() as stop:
        tally = hunt(campaign, stop, following(console, out, start))
        took = time.perf_counter() - start
        print_summary(tally, console, took, stopped=stop.is_set())
    if json is not None:
        json.write_bytes(as_json(record_of(tally, took, out, stopped=stop.is_set())))
    if target is not None:
        print_kernels(kernel_uses(target, tally.uses), console)
    raise typer.Exit(2 if says_nothing(tally) or not tally.histories else int(bool(tally.found)))


def _replay(file: Path, world: str, setting: Setting, drill: str, console: Console) -> NoReturn:
    history = load_scenario(file)
    if not isinstance(history, History):
        raise InvalidInput("--replay", expected="a history", received=str(file))
    findings = list(rehearsed(history).findings)
    with Worlds(setting) as worlds:
        played_on = worlds.get(world, history.world_size)
        findings += try_history(played_on, history, setting).findings
        if drill:
            check_drill(parse_drill(drill), history)
            findings += unnoticed(played_on, history, parse_drill(drill))
    for finding in findings:
        console.print(str(finding), soft_wrap=True)
    console.print("broke" if findings else "held")
    raise typer.Exit(int(bool(findings)))
