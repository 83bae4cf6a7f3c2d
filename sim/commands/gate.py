"""``cpkv gate``: do the laws hold?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import torch
import typer

from refmodel.errors import InvalidInput
from sim.cases.trace import Rotation
from sim.commands.listing import print_scenarios
from sim.faults.fault import Fault
from sim.gate.campaign import Campaign, execute, is_started, named_scenarios, plan_campaign
from sim.gate.record import Report, as_json
from sim.gate.services import DEFAULT_CHUNK, DEFAULT_EVERY, ServiceRun, choose_services
from sim.gate.setting import Setting
from sim.gate.traces import DEFAULT_PAGE, DEFAULT_RANKS, EMBEDDED, TraceRun, choose_traces
from sim.kernels.loading import named
from sim.machine import started_rank
from sim.report.console import open_console, ticking
from sim.report.files import check_writable
from sim.report.github import annotation_lines
from sim.report.junit import as_junit
from sim.report.text import print_report
from sim.timeline import Timed, write_timeline

_TRACES = "Traces"
_SERVED = "Traces through the serving engine"
_REPORTS = "Reports"
_CONDITIONS = "Conditions"


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
    schedule: Annotated[
        str,
        typer.Option(
            help='Order of ranks on lockstep: "random", "in-order", "pct", or the token of a run.',
            rich_help_panel=_CONDITIONS,
        ),
    ] = "random",
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help='What a rank suffers, such as "skip rank=1 at=kv.view"; may be repeated.',
            rich_help_panel=_CONDITIONS,
        ),
    ] = None,
    self_check: Annotated[
        bool,
        typer.Option(
            "--self-check",
            help="On lockstep, run each schedule twice and compare: nothing else may have a say.",
            rich_help_panel=_CONDITIONS,
        ),
    ] = False,
    kernels: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            help="Kernels to put in the place of the reference: a file, a module, one function of it with "
            ":NAME, or an entry point of cpkv.kernels.",
            rich_help_panel=_CONDITIONS,
        ),
    ] = None,
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
    pool: Annotated[
        str | None,
        typer.Option(
            help="Serve the trace by the engine instead, with cache for so much of its pages, such as 25%.",
            rich_help_panel=_SERVED,
        ),
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most new tokens of a forward.",
            show_default=str(DEFAULT_CHUNK),
            rich_help_panel=_SERVED,
        ),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Compare the tables of all ranks, and check them, after so many steps; at the end anyway.",
            show_default=str(DEFAULT_EVERY),
            rich_help_panel=_SERVED,
        ),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(help="Write JUnit XML there.", rich_help_panel=_REPORTS)
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write all that was found there.", rich_help_panel=_REPORTS)
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            help="Write what every rank called, and when, there; Perfetto opens it.", rich_help_panel=_REPORTS
        ),
    ] = None,
) -> None:
    """Run scenarios and traces on worlds, and say whether every law held.

    Without arguments: the whole catalogue, then a small embedded trace. Exit code 0: all held; 1: a law
    broke, and each failure ends in the line that replays it; 2: nothing can be said, since the input makes
    no sense or what the ranks run on broke twice.

    **Examples**

    - `cpkv gate`: all of it
    - `cpkv gate short_tail`: one theme of the catalogue
    - `cpkv gate my.yaml --world gloo`: a file of your own, on processes
    - `cpkv gate --trace trace.jsonl --requests 1000 --cp 8`: a trace at full length
    - `cpkv gate --trace trace.jsonl --requests 1000 --cp 4 --pool 25%`: the same, with a cache that is full
    - `cpkv gate --junit gate.xml`: for continuous integration
    - `cpkv gate worked/tokens-300 --fault "skip rank=1 at=kv.view"`: a rank that leaves a gather out
    - `cpkv gate --kernels my_kernels.py`: with kernels of your own in the place of the reference
    - `cpkv gate worked/tokens-300 --timeline run.json`: what each rank called, for ui.perfetto.dev
    """
    names = scenario or []
    if list_only:
        print_scenarios(named_scenarios(names), open_console())
        return
    check_writable(junit=junit, json=json, timeline=timeline)
    faults = tuple(Fault.parse(text) for text in fault or [])
    setting = Setting(
        seed=seed,
        schedule=schedule,
        faults=faults,
        self_check=self_check,
        kernels=None if kernels is None else named(kernels),
    )
    traces: list[TraceRun] | list[ServiceRun] = []
    if trace is None and (names or pool is not None):
        _refuse_without_trace(
            requests=requests, cp=cp, page=page, rotation=rotation, pool=pool, chunk=chunk, every=every
        )
    elif trace is not None and pool is not None:
        _refuse_together("--pool", rotation=rotation)
        traces = choose_services(
            trace,
            limit=requests,
            worlds=world or [],
            ranks=cp,
            page_size=page,
            pool=pool,
            chunk=chunk,
            every=every,
            setting=setting,
        )
    else:
        _refuse_without_pool(chunk=chunk, every=every)
        traces = choose_traces(
            trace or EMBEDDED,
            limit=requests,
            worlds=world or [],
            ranks=cp,
            page_size=page,
            rotation=rotation,
            setting=setting,
        )
    scenarios = named_scenarios(names) if names or trace is None else []
    timed: list[Timed] | None = None if timeline is None else []
    campaign = plan_campaign(scenarios, traces, worlds=world or [], named=bool(names), setting=setting)
    # Of processes that torchrun started, all run and come to one verdict; the first one reports.
    reporting = not is_started(campaign) or started_rank() == 0
    report = _run(campaign, timed, reporting)
    if reporting:
        _write(report, timed or [], junit=junit, json=json, timeline=timeline)
    raise typer.Exit(_exit_code(report))


def _write(
    report: Report, timed: list[Timed], *, junit: Path | None, json: Path | None, timeline: Path | None
) -> None:
    if junit is not None:
        junit.write_bytes(as_junit(report))
    if json is not None:
        json.write_bytes(as_json(report))
    if timeline is not None:
        write_timeline(timeline, timed)


def _exit_code(report: Report) -> int:
    if report.held:
        return 0
    return 2 if report.says_nothing else 1


def _run(campaign: Campaign, timed: list[Timed] | None, reporting: bool) -> Report:
    """Run it and print what came out."""
    # Index tensors are short: more threads would spend longer on waking up than on the work.
    torch.set_num_threads(1)
    console = open_console(quiet=not reporting)
    with ticking(console, campaign.ticks) as tick:
        report = execute(campaign, tick, timed)
    print_report(report, console)
    if reporting and os.environ.get("GITHUB_ACTIONS") == "true":
        for line in annotation_lines(report):
            typer.echo(line)
    return report


def _refuse_without_trace(**options: object) -> None:
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given:
        raise InvalidInput(
            ", ".join(given),
            expected="a trace to run",
            received="scenarios alone, which say such things themselves",
            fix=f"Add --trace FILE, or --trace {EMBEDDED}.",
        )


def _refuse_without_pool(**options: object) -> None:
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given:
        raise InvalidInput(
            ", ".join(given),
            expected="a trace through the engine",
            received="none",
            fix="Add --trace FILE and --pool 25%.",
        )


def _refuse_together(option: str, **others: object) -> None:
    given = [f"--{name}" for name, value in others.items() if value is not None]
    if given:
        raise InvalidInput(
            ", ".join(given),
            expected=f"no such option with {option}",
            received=" ".join(given),
            fix="The engine begins each request in turn on another rank.",
        )
