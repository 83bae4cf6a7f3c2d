"""A gate run in words: the table by theme, what broke and how to run it again, one line at the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from refmodel.laws import LAWS
from sim.gate.kernels import KernelUses
from sim.gate.record import Broken, Entry, Report, ServiceNumbers, TraceNumbers

HELD = ("held", "green")
BROKE = ("broke", "bold red")
MOST_SHOWN = 5  # findings of one run
LONGEST_TOKEN = 200  # characters of a schedule; --json keeps longer ones


def print_report(report: Report, console: Console) -> None:
    """All of it: table, traces, marks, failures, summary."""
    if report.runs:
        console.print(_themes(report.runs))
    for entry in report.runs:
        if entry.trace is not None:
            _print_trace(entry, entry.trace, console)
        if entry.service is not None:
            _print_service(entry, entry.service, console)
    _print_marks(report, console)
    if report.kernels is not None:
        print_kernels(report.kernels, console)
    for entry in report.broken:
        print_failure(entry, console)
    console.print(_summary(report), soft_wrap=True)


def _themes(runs: Iterable[Entry]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("theme", no_wrap=True)
    for name in ("scenarios", "worlds", "rows checked", "collectives", "seconds", ""):
        table.add_column(name, justify="left" if name in {"worlds", ""} else "right")
    for theme, group in groupby(sorted(runs, key=lambda entry: entry.theme), lambda entry: entry.theme):
        entries = list(group)
        table.add_row(
            theme,
            f"{len({entry.file for entry in entries})}",
            _worlds(entries),
            f"{sum(entry.rows_checked for entry in entries):,}",
            f"{sum(entry.collectives for entry in entries):,}",
            f"{sum(entry.seconds for entry in entries):.2f}",
            Text(*(HELD if all(entry.held for entry in entries) else BROKE)),
        )
    return table


def _worlds(entries: Iterable[Entry]) -> str:
    """``lockstep 2 4 8, gloo 4``"""
    sizes: dict[str, set[int]] = {}
    for entry in entries:
        kind, _, size = entry.world.partition(":")
        sizes.setdefault(kind, set()).add(int(size))
    return ", ".join(f"{kind} {' '.join(map(str, sorted(of_kind)))}" for kind, of_kind in sizes.items())


def _print_trace(entry: Entry, trace: TraceNumbers, console: Console) -> None:
    share = trace.bytes_fullest_rank / trace.bytes_replicated
    token_bytes = trace.bytes_replicated // (trace.pages * trace.page_size)
    console.print(
        f"trace {trace.source} on {entry.world}, pages of {trace.page_size}, rotation {trace.rotation}",
        soft_wrap=True,
    )
    rows = (
        ("requests", f"{trace.requests:,}, {trace.tokens:,} tokens, {trace.hit_share:.1%} found in cache"),
        ("pages", f"{trace.pages:,}, the fullest lane {trace.imbalance:.4f} times the mean"),
        (
            "a rank holds",
            f"at most {_size(trace.bytes_fullest_rank)}, {share:.1%} of the replicated layout's "
            f"{_size(trace.bytes_replicated)}; a token is {token_bytes} B",
        ),
        ("moved", f"{_size(trace.bytes_moved)} in {entry.collectives:,} collectives"),
        ("checked", f"{entry.rows_checked:,} rows in {entry.seconds:.1f} s"),
        ("digest", entry.digest or "none"),
    )
    print_pairs(rows, console)
    console.print()


def _print_service(entry: Entry, service: ServiceNumbers, console: Console) -> None:
    found = (service.device_tokens, service.host_tokens, service.storage_tokens)
    device, host, storage = (f"{tokens / max(1, service.tokens):.1%}" for tokens in found)
    gone = [(service.returned, "sent back to the queue"), (service.dropped, "given up")]
    console.print(
        f"trace {service.source} through the engine on {entry.world}, pages of {service.page_size}, "
        f"chunks of {service.chunk:,}",
        soft_wrap=True,
    )
    rows = (
        (
            "requests",
            ", ".join(
                [
                    f"{service.requests:,}, {service.tokens:,} tokens in {service.chunks:,} chunks",
                    f"{service.decodes:,} decoded",
                    *(f"{count:,} {what}" for count, what in gone if count),
                ]
            ),
        ),
        ("found", f"{device} on the device, {host} on the host, {storage} in storage"),
        (
            "pool",
            f"{service.pages_per_lane:,} pages a lane, {service.pool:g}% of {service.distinct_pages:,} in "
            f"all, {service.host_pages_per_lane:,} on the host; {service.evicted_pages:,} evicted",
        ),
        (
            "live tokens",
            f"at most {service.peak_live_tokens:,}; tables hold {service.bytes_per_live_token:.1f} B a token",
        ),
        ("checked", f"{entry.rows_checked:,} rows in {entry.seconds:.1f} s"),
        ("digest", entry.digest or "none"),
    )
    print_pairs(rows, console)
    console.print()


def _size(num_bytes: float) -> str:
    """``10.3 MiB``"""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.0f} {unit}" if unit == "B" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"


def _print_marks(report: Report, console: Console) -> None:
    if report.marks.reached:
        console.print(f"reached: {', '.join(report.marks.reached)}")
    if report.marks.missing:
        missing = f"never reached: {', '.join(report.marks.missing)}; the catalogue proves too little"
        console.print(Text(missing, BROKE[1]))
    if report.marks.reached or report.marks.missing:
        console.print()


def print_kernels(kernels: KernelUses, console: Console) -> None:
    """A line an operation: where kernels stood, and where the reference stayed."""
    console.print(f"kernels of {kernels.target}", soft_wrap=True)
    width = max(len(use.op) for use in kernels.ops)
    for use in kernels.ops:
        console.print(f"  {use.op:<{width}}  {use.words}", soft_wrap=True)
    console.print()


def print_failure(entry: Entry, console: Console) -> None:
    """What broke in one run, where, and the line that replays it."""
    console.rule(Text(f"{entry.theme}/{entry.name} on {entry.world}, seed {entry.seed}"), align="left")
    console.print(entry.title, soft_wrap=True)
    for finding in entry.findings[:MOST_SHOWN]:
        console.print()
        console.print(Text(headline(finding), BROKE[1]))
        print_pairs(finding_lines(finding), console)
    if len(entry.findings) > MOST_SHOWN:
        console.print(f"\nand {len(entry.findings) - MOST_SHOWN} more, which --json and --junit keep")
    console.print()
    schedule = [("schedule", entry.schedule)] if 0 < len(entry.schedule) <= LONGEST_TOKEN else []
    print_pairs([*schedule, ("replay", entry.replay)], console)
    console.print()


def headline(finding: Broken) -> str:
    """Which law broke, and what it says."""
    name = f"{finding.law} broke" if finding.law in LAWS else finding.law
    return f"{name}: {finding.statement}"


def finding_lines(finding: Broken) -> Sequence[tuple[str, str]]:
    """(name, value) of what is known of a finding."""
    lines = (
        ("where", finding.place),
        ("what", finding.what),
        ("expected", finding.expected),
        ("received", finding.received),
    )
    return [(name, value) for name, value in lines if value]


def print_pairs(pairs: Iterable[tuple[str, str]], console: Console) -> None:
    """A line a pair, more where a value has more lines."""
    # Not a table: a line that is to be copied must not be wrapped.
    for name, value in pairs:
        first, *more = value.splitlines()
        console.print(f"  {name:<12}  {first}".rstrip(), soft_wrap=True)
        for line in more:
            console.print(f"  {'':<12}  {line}".rstrip(), soft_wrap=True)


def _summary(report: Report) -> Text:
    rows = sum(entry.rows_checked for entry in report.runs)
    calls = sum(entry.collectives for entry in report.runs)
    word, style = HELD if report.held else BROKE
    runs = f"{len(report.runs)} run{'' if len(report.runs) == 1 else 's'}"
    if report.broken:
        runs = f"{len(report.broken)} of {runs} broke"
    retried = sum(entry.retried for entry in report.runs)
    again = f", {retried} of them at a second attempt" if retried else ""
    missing = f", {len(report.marks.missing)} marks never reached" if report.marks.missing else ""
    return Text.assemble(
        (f"gate {word}", style),
        f": {runs}{again}{missing}; {rows:,} rows checked, {calls:,} collectives, {report.seconds:.1f} s",
    )
