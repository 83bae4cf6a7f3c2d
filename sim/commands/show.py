"""``cpkv show``: what a scenario does, forward by forward, or a history, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from refmodel.errors import InvalidInput
from sim.cases.build import build_case
from sim.cases.library import AnyScenario, find_scenarios
from sim.cases.scenario import Scenario
from sim.gate.record import as_json
from sim.histories.history import History
from sim.picture.anatomy import Anatomy, anatomy
from sim.picture.ledger_of_steps import ledger_of_steps, print_ledger
from sim.picture.plot import draw
from sim.picture.strip import print_forward
from sim.report.console import open_console

T = TypeVar("T")


def show(
    scenario: Annotated[str, typer.Argument(help="A file, or a name of the catalogue.")],
    step: Annotated[int | None, typer.Option(min=1, help="Only this step.", show_default="all")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of drawing.")] = False,
    png: Annotated[Path | None, typer.Option(help="Draw a picture into this file instead.")] = None,
) -> None:
    """Draw what a scenario does: who owns and computes each page, and what each rank sends.

    A strip shows the pages of a request in position order: logical page, owner, the ranks that compute
    its new rows, and its valid rows (`<` marks a partly filled page). The table below shows the segments of
    each rank, and what it sends; `+n` is filler, since all ranks send as much as the longest.

    Of a history it shows a line a step: the operation, what became of its requests, and the pages taken of
    each lane, evicted from it, and free there afterwards.

    **Examples**

    - `cpkv show worked/tokens-1000`: all steps
    - `cpkv show my.yaml --step 2`
    - `cpkv show lanes/exhausted`: a history
    - `cpkv show my.yaml --png my.png`: needs `pip install cpkv-testbed[plot]`
    """
    found = _the_scenario(scenario)
    if isinstance(found, History):
        _show_history(found, step, json=json, png=png)
        return
    forwards = _forwards(found, step)
    if png is not None:
        draw(forwards, found.title, png)
        typer.echo(f"{png}: {len(forwards)} step{'' if len(forwards) == 1 else 's'}")
    elif json:
        typer.echo(as_json(forwards), nl=False)
    else:
        console = open_console()
        console.print(found.title, style="bold", soft_wrap=True)
        for forward in forwards:
            print_forward(forward, console)


def _show_history(history: History, step: int | None, *, json: bool, png: Path | None) -> None:
    if png is not None:
        raise InvalidInput("--png", expected="a scenario of forwards", received=f"the history {history.file}")
    lines = _chosen(ledger_of_steps(history), step)
    if json:
        typer.echo(as_json(lines), nl=False)
        return
    console = open_console()
    console.print(history.title, style="bold", soft_wrap=True)
    print_ledger(lines, console)


def _the_scenario(name: str) -> AnyScenario:
    found = find_scenarios(name)
    if len(found) > 1:
        raise InvalidInput(
            "scenario",
            expected="one scenario",
            received=f"{name}, which is {len(found)}",
            fix=f"For example {found[0].file.removesuffix('.yaml')}.",
        )
    return found[0]


def _forwards(scenario: Scenario, step: int | None) -> list[Anatomy]:
    case = build_case(scenario)
    return [anatomy(case, forward) for forward in _chosen(case.forwards, step)]


def _chosen(steps: Sequence[T], step: int | None) -> Sequence[T]:
    """All of them, or the one of that number."""
    if step is not None and step > len(steps):
        raise InvalidInput("--step", expected=f"1 … {len(steps)}", received=step)
    return steps if step is None else steps[step - 1 : step]
