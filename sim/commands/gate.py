"""``cpkv gate``: do the laws hold?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from refmodel.errors import InvalidInput
from sim.cases.scenario import Scenario
from sim.cases.trace import Rotation
from sim.commands.listing import print_scenarios
from sim.gate.campaign import execute, named_scenarios, plan_campaign
from sim.gate.record import Report, as_json
from sim.gate.traces import DEFAULT_PAGE, DEFAULT_RANKS, EMBEDDED, TraceRun, choose_traces
from sim.report.console import open_console, ticking
from sim.report.github import annotation_lines
from sim.report.junit import as_junit
from sim.report.text import print_report

_TRACES = "Traces"
_REPORTS = "Reports"


def gate(
    scenario: Annotated[
        list[str] | None,
        typer.Argument(help="Files, folders, or names or themes of the catalogue.", show_default="all of it"),
    ] = None,
    world: Annotated[
        list[str] | None,
        typer.Option(
            help="Where to run, such as lockstep, gloo or gloo:4; may be repeated.",
            show_default="those that each scenario lists",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the schedule of ranks.")] = 0,
    list_only: Annotated[bool, typer.Option("--list", help="List the scenarios and run nothing.")] = False,
    trace: Annotated[
        str | None,
        typer.Option(help=f'A trace in Mooncake\'s format, or "{EMBEDDED}".', rich_help_panel=_TRACES),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Run the first so many.", show_default="all", rich_help_panel=_TRACES),
    ] = None,
    cp: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks W.", show_default=str(DEFAULT_RANKS), rich_help_panel=_TRACES),
    ] = None,
    page: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens a page P.", show_default=str(DEFAULT_PAGE), rich_help_panel=_TRACES),
    ] = None,
    rotation: Annotated[
        Rotation | None,
        typer.Option(
            help="First page of a request always in rank 0's lane, or turned so that lanes stay even.",
            show_default="none",
            rich_help_panel=_TRACES,
        ),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(help="Write JUnit XML there.", rich_help_panel=_REPORTS)
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write all that was found there.", rich_help_panel=_REPORTS)
    ] = None,
) -> None:
    """Run scenarios and traces on worlds, and say whether every law held.

    Without arguments: the whole catalogue, then a small embedded trace. Exit code 0: all held; 1: a law
    broke, and each failure ends in the line that replays it; 2: the input makes no sense.

    **Examples**

    - `cpkv gate`: all of it
    - `cpkv gate short_tail`: one theme of the catalogue
    - `cpkv gate my.yaml --world gloo`: a file of your own, on processes
    - `cpkv gate --trace trace.jsonl --requests 1000 --cp 8`: a trace at full length
    - `cpkv gate --junit gate.xml`: for continuous integration
    """
    names = scenario or []
    if list_only:
        print_scenarios(named_scenarios(names), open_console())
        return
    _refuse_missing_folders(junit=junit, json=json)
    traces: list[TraceRun] = []
    if names and trace is None:
        _refuse_without_trace(requests=requests, cp=cp, page=page, rotation=rotation)
    else:
        traces = choose_traces(
            trace or EMBEDDED,
            limit=requests,
            worlds=world or [],
            ranks=cp,
            page_size=page,
            rotation=rotation,
            seed=seed,
        )
    scenarios = named_scenarios(names) if names or trace is None else []
    report = _run(scenarios, traces, worlds=world or [], named=bool(names), seed=seed)
    if junit is not None:
        junit.write_bytes(as_junit(report))
    if json is not None:
        json.write_bytes(as_json(report))
    raise typer.Exit(0 if report.held else 1)


def _run(
    scenarios: Sequence[Scenario],
    traces: Sequence[TraceRun],
    *,
    worlds: Sequence[str],
    named: bool,
    seed: int,
) -> Report:
    """Check everything, run it, print what came out."""
    # Index tensors are short: more threads would spend longer on waking up than on the work.
    torch.set_num_threads(1)
    console = open_console()
    campaign = plan_campaign(scenarios, traces, worlds=worlds, named=named, seed=seed)
    with ticking(console, campaign.ticks) as tick:
        report = execute(campaign, tick)
    print_report(report, console)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in annotation_lines(report):
            typer.echo(line)
    return report


def _refuse_missing_folders(**files: Path | None) -> None:
    """A report that cannot be written must be known before the run, not after it."""
    for option, file in files.items():
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise InvalidInput(f"--{option}", expected="a file in a folder that exists", received=file)


def _refuse_without_trace(**options: object) -> None:
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given:
        raise InvalidInput(
            ", ".join(given),
            expected="a trace to run",
            received="scenarios alone, which say such things themselves",
            fix=f"Add --trace FILE, or --trace {EMBEDDED}.",
        )
