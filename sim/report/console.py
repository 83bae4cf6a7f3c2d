"""Where text goes: a terminal, or a log. And how far a run is, in either."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LOG_COLUMNS = 110  # of a log, which has no width of its own
_QUIET_SECONDS = 10.0  # a log hears of a long run this often

Tick = Callable[[str], None]


def open_console(*, quiet: bool = False) -> Console:
    """The console of standard output. Text is printed as it is: ``a[0:64]`` is not markup."""
    console = Console(highlight=False, markup=False, emoji=False, quiet=quiet)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = LOG_COLUMNS
    return console


@contextmanager
def ticking(console: Console, total: int) -> Iterator[Tick]:
    """Gives ``tick(label)``, for ``total`` calls: a bar on a terminal, a line now and then in a log."""
    if console.is_terminal and "CI" not in os.environ:
        with _bar(console) as bar:
            task = bar.add_task("", total=total)
            yield lambda label: bar.update(task, advance=1, description=label)
    else:
        yield _log(console, total)


def _bar(console: Console) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, transient=True)


def _log(console: Console, total: int) -> Tick:
    done, spoken = 0, time.monotonic()

    def tick(label: str) -> None:
        nonlocal done, spoken
        done += 1
        if time.monotonic() - spoken > _QUIET_SECONDS:
            spoken = time.monotonic()
            console.print(f"{done} of {total}: {label}")

    return tick
