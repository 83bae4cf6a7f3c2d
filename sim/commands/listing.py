"""The catalogue as a list."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath

from rich import box
from rich.console import Console
from rich.table import Table

from sim.cases.library import AnyScenario, theme_of


def print_scenarios(scenarios: Iterable[AnyScenario], console: Console) -> None:
    """A line a scenario: name, ranks, page size, worlds, laws, title."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("scenario", no_wrap=True)  # to be copied
    for name in ("W", "P"):
        table.add_column(name, justify="right")
    for name in ("worlds", "laws", "title"):
        table.add_column(name)
    for scenario in scenarios:
        table.add_row(
            f"{theme_of(scenario)}/{PurePath(scenario.file).stem}",
            str(scenario.world_size),
            str(scenario.page_size),
            " ".join(scenario.worlds),
            " ".join(scenario.laws),
            scenario.title,
        )
    console.print(table)
