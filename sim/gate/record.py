"""What a gate run found, as plain values: the JSON report, and what the table and JUnit are made from.

The keys of the JSON report are the field names below. They stay; a change of meaning raises ``schema``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import PurePath
from typing import Any, Protocol

import msgspec

from refmodel.errors import Finding
from refmodel.laws import LAWS
from sim.cases.library import theme_of
from sim.gate.histories import REFUSAL
from sim.gate.kernels import KernelUses
from sim.gate.marks import MARKS
from sim.gate.runs import Outcome
from sim.gate.setting import Setting
from sim.gate.verdict import INFRASTRUCTURE, Verdict

SCHEMA = 1


class Broken(msgspec.Struct, frozen=True):
    """One place where a law broke."""

    law: str  # "V1"; "crash" when a rank did not return, "infrastructure" when what it runs on broke
    statement: str  # of that law
    what: str
    expected: str
    received: str
    where: dict[str, str | int]  # what is known of: step, rank, request, layer, cache, page, slot, …

    @property
    def place(self) -> str:
        """``where`` on one line."""
        return ", ".join(f"{name} {value}" for name, value in self.where.items())


class TraceNumbers(msgspec.Struct, frozen=True):
    """What a trace was, and what it cost."""

    source: str  # a file, or "embedded"
    world_size: int
    page_size: int
    rotation: str
    requests: int
    tokens: int
    pages: int  # held at the end, by all lanes
    hit_share: float  # of the tokens: found in cache
    imbalance: float  # pages of the fullest lane over the mean; 1.0 is even
    bytes_moved: int  # by all ranks and collectives, padding included
    bytes_fullest_rank: int  # KV that the fullest lane holds
    bytes_replicated: int  # KV that every rank would hold without sharing


class ServiceNumbers(msgspec.Struct, frozen=True):
    """What a trace was that the serving engine served, and what came of it."""

    source: str  # a file, or "embedded"
    world_size: int
    page_size: int
    chunk: int  # most new tokens of a forward
    pool: float  # percent of the distinct pages
    distinct_pages: int  # that a cache without an end would hold
    pages_per_lane: int
    host_pages_per_lane: int
    requests: int  # that finished
    tokens: int  # of their prompts
    device_tokens: int  # of them, found in cache on the device
    host_tokens: int  # and on the host
    storage_tokens: int  # and in storage
    chunks: int  # of prompts, computed
    decodes: int  # tokens sampled
    evicted_pages: int  # from the device
    returned: int  # requests sent back to the queue, as lanes were full
    dropped: int  # requests that got no pages even alone
    peak_live_tokens: int  # slots of pages that were not free
    bytes_per_live_token: float  # that the tables of a rank held for tokens, at most


class Entry(msgspec.Struct, frozen=True):
    """One scenario, or one trace, on one world."""

    theme: str  # folder of the scenario; "trace"
    name: str
    file: str
    title: str
    laws: list[str]  # that the scenario says it is about
    world: str  # "lockstep:4"
    seed: int
    schedule: str  # the token that replays the order of ranks; empty but for lockstep
    retried: bool  # held at the second attempt, after a failure of the infrastructure
    seconds: float
    rows_checked: int
    collectives: int  # a rank issued
    fallbacks: int  # forwards that took the gathered write
    digest: str  # the same on every world and every run
    replay: str  # the command that runs this again
    findings: list[Broken]
    held: bool
    trace: TraceNumbers | None = None
    service: ServiceNumbers | None = None  # of a trace with --pool


class Reachability(msgspec.Struct, frozen=True):
    """Places that hurt: which of them the run went to."""

    reached: list[str]
    missing: list[str] | None  # null: not judged, since not the whole catalogue ran


class Report(msgspec.Struct, frozen=True):
    """A whole gate run."""

    schema: int
    version: str  # of cpkv
    held: bool
    seed: int
    seconds: float
    runs: list[Entry]
    marks: Reachability
    kernels: KernelUses | None = None  # of a target in the place of the reference

    @property
    def broken(self) -> list[Entry]:
        return [entry for entry in self.runs if not entry.held]

    @property
    def says_nothing(self) -> bool:
        """Whether nothing broke but what the ranks run on: that is no verdict."""
        laws = {finding.law for entry in self.broken for finding in entry.findings}
        return laws == {INFRASTRUCTURE} and not self.marks.missing


# Of what is no law of the contract.
_STATEMENTS = {
    "crash": "Every rank returns.",
    REFUSAL: "A step of a history is refused if it says so, and only then.",
    INFRASTRUCTURE: "What the ranks run on works; if it does not, nothing is said about the program.",
}


def broken(finding: Finding) -> Broken:
    """A finding with the statement of its law beside it."""
    known = LAWS.get(finding.law)
    return Broken(
        law=finding.law,
        statement=known.statement if known else _STATEMENTS[finding.law],
        what=finding.what,
        expected=finding.expected,
        received=finding.received,
        where={name: value for name, value in asdict(finding.where).items() if value is not None},
    )


class TracedRun(Protocol):
    """A trace on a world."""

    @property
    def source(self) -> str:
        """A file, or what stands for one."""

    @property
    def world(self) -> str: ...

    @property
    def setting(self) -> Setting: ...

    @property
    def replay(self) -> str:
        """The one line that runs this again."""


def entry_of_trace(
    run: TracedRun,
    verdict: Verdict[Any],
    *,
    title: str,
    laws: list[str],
    seconds: float,
    fallbacks: int = 0,
    trace: TraceNumbers | None = None,
    service: ServiceNumbers | None = None,
) -> Entry:
    """The record of a trace, with the numbers of how it was run."""
    return Entry(
        theme="trace",
        name=PurePath(run.source).stem,
        file=run.source,
        title=title,
        laws=laws,
        world=run.world,
        seed=run.setting.seed,
        schedule=verdict.schedule,
        retried=verdict.retried,
        seconds=round(seconds, 6),
        rows_checked=verdict.rows_checked,
        collectives=verdict.calls,
        fallbacks=fallbacks,
        digest=verdict.digest,
        replay=run.replay,
        findings=[broken(finding) for finding in verdict.findings],
        held=not verdict.findings,
        trace=trace,
        service=service,
    )


def entry_of(outcome: Outcome) -> Entry:
    """The record of a scenario's outcome."""
    scenario = outcome.scenario
    return Entry(
        theme=theme_of(scenario),
        name=PurePath(scenario.file).stem,
        file=scenario.file,
        title=scenario.title,
        laws=scenario.laws,
        world=outcome.world,
        seed=outcome.setting.seed,
        schedule=outcome.schedule,
        retried=outcome.retried,
        seconds=round(outcome.seconds, 6),
        rows_checked=outcome.rows_checked,
        collectives=outcome.calls,
        fallbacks=outcome.fallbacks,
        digest=outcome.digest,
        replay=outcome.replay,
        findings=[broken(finding) for finding in outcome.findings],
        held=outcome.held,
    )


def report_of(
    runs: list[Entry],
    marks: Iterable[str],
    *,
    whole_catalogue: bool,
    seed: int,
    seconds: float,
    kernels: KernelUses | None = None,
) -> Report:
    """The record of a whole run. A mark that the whole catalogue never reached breaks the gate."""
    reached = set(marks)
    missing = [mark for mark in MARKS if mark not in reached] if whole_catalogue else None
    return Report(
        schema=SCHEMA,
        version=version("cpkv-testbed"),
        held=not missing and all(entry.held for entry in runs),
        seed=seed,
        seconds=round(seconds, 6),
        runs=runs,
        marks=Reachability([mark for mark in MARKS if mark in reached], missing),
        kernels=kernels,
    )


def as_json(value: object) -> bytes:
    """Indented JSON, with a line end."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
