"""``cpkv show``: what a scenario does, forward by forward."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from refmodel.errors import InvalidInput
from sim.cases.build import build_case
from sim.cases.library import find_scenarios
from sim.cases.scenario import Scenario
from sim.gate.record import as_json
from sim.picture.anatomy import Anatomy, anatomy
from sim.picture.plot import draw
from sim.picture.strip import print_forward
from sim.report.console import open_console


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

    **Examples**

    - `cpkv show worked/tokens-1000`: all steps
    - `cpkv show my.yaml --step 2`
    - `cpkv show my.yaml --png my.png`: needs `pip install cpkv-testbed[plot]`
    """
    found = _the_scenario(scenario)
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


def _the_scenario(name: str) -> Scenario:
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
    if step is not None and step > len(case.forwards):
        raise InvalidInput("--step", expected=f"1 … {len(case.forwards)}", received=step)
    chosen = case.forwards if step is None else case.forwards[step - 1 : step]
    return [anatomy(case, forward) for forward in chosen]
