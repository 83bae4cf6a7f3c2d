"""A check in words: a line an operation, then each failure with what it takes to see it again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from properties.kernels.verdicts import Failure, Report, Verdict
from refmodel.laws import LAWS
from sim.report.text import print_pairs

_STYLES = {"pass": "green", "fail": "bold red", "known": "yellow", "unknown": "yellow"}


def print_report(report: Report, console: Console) -> None:
    """All of it: table, what the target lacks, failures, summary."""
    console.print(_table(report.verdicts))
    console.print()
    if report.lacking:
        console.print(f"not in the target: {', '.join(report.lacking)}", soft_wrap=True)
    for name, op in report.near_misses.items():
        console.print(f"{name} is no operation; is it meant to be {op}?", soft_wrap=True)
    for verdict in report.verdicts:
        if verdict.verdict == "fail" and verdict.failure is not None:
            console.print()
            print_failure(verdict.op, verdict.failure, console)
        elif verdict.why:
            console.print(f"{verdict.op}: {verdict.verdict}, {verdict.why}", soft_wrap=True)
    console.print(_summary(report), soft_wrap=True)


def _table(verdicts: Iterable[Verdict]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("operation", no_wrap=True)
    for name in ("cases", "tries", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("")
    table.add_column("declared", overflow="fold")
    for verdict in verdicts:
        broke = f" ({verdict.failure.kind})" if verdict.failure is not None else ""
        table.add_row(
            verdict.op,
            f"{verdict.cases:,}",
            f"{verdict.attempts:,}",
            f"{verdict.seconds:.2f}",
            Text(f"{verdict.verdict}{broke}", _STYLES[verdict.verdict]),
            "; ".join(f"{name} {value}" for name, value in verdict.declared.items()),
        )
    return table


def print_failure(op: str, failure: Failure, console: Console) -> None:
    """What broke, on which input, and how to call it so oneself."""
    console.rule(Text(op), align="left")
    console.print(Text(headline(failure), _STYLES["fail"]), soft_wrap=True)
    print_pairs(failure_lines(failure), console)
    if failure.code:
        console.print("\n" + failure.code + "\n", soft_wrap=True)


def headline(failure: Failure) -> str:
    """Which law or rule broke, and what it says."""
    name = f"{failure.kind} broke" if failure.kind in LAWS else failure.kind
    return f"{name}: {failure.statement}"


def failure_lines(failure: Failure) -> Sequence[tuple[str, str]]:
    """(name, value) of what is known of a failure."""
    lines = (
        ("what", failure.what),
        ("expected", failure.expected),
        ("received", failure.received),
        ("rank", "" if failure.rank is None else str(failure.rank)),
        ("handed over", failure.handling),
        ("steady", "" if failure.steady else "no: tried again, this case held"),
        ("replay", failure.replay),
    )
    return [(name, value) for name, value in lines if value]


def _summary(report: Report) -> Text:
    words = [verdict.verdict for verdict in report.verdicts]
    counts = ", ".join(f"{words.count(word)} {word}" for word in _STYLES if word in words)
    verdict = ("held", "broke", "says nothing")[report.exit_code]
    style = ("green", _STYLES["fail"], "yellow")[report.exit_code]
    cases = sum(one.cases for one in report.verdicts)
    return Text.assemble(
        (f"check {verdict}", style), f": {counts}; {cases:,} cases on {report.device}, {report.seconds:.1f} s"
    )
