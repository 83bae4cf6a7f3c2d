"""One case on one world, judged: what each rank found, and what only shows when all are together."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch.distributed as dist

from refmodel.collectives import Call
from refmodel.errors import FallbackWarning, Finding, Where
from refmodel.storage.reuse import ViewPath, read_verdict
from sim.cases.case import Case
from sim.failures import (
    Deadlock,
    Diverged,
    InfrastructureFailed,
    RankFailed,
    RunFailed,
    WorldUnavailable,
)
from sim.gate.numbers import judge_numbers
from sim.gate.setting import PLAIN, Setting
from sim.kernels.in_place import with_kernels
from sim.kernels.uses import NO_USES, Uses, sum_of
from sim.serving.program import serve
from sim.serving.report import RankReport
from sim.surface.group import Span
from sim.world import Run, Watch, World

T = TypeVar("T")

INFRASTRUCTURE = "infrastructure"  # stands where a law would, when nothing can be said about the program


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What came of a case."""

    findings: tuple[Finding, ...]
    reports: tuple[RankReport, ...] = ()  # of each rank; none if the run ended without results
    ledgers: tuple[tuple[Call, ...], ...] = ((),)
    spans: tuple[tuple[Span, ...], ...] = ()
    schedule: str = ""  # the token that replays it; of lockstep only
    retried: bool = False
    uses: Uses = NO_USES  # of kernels, by all ranks

    @property
    def digest(self) -> str:
        """The same on every rank, world and run; empty if there is none."""
        return self.reports[0].digest if self.reports else ""

    @property
    def rows_checked(self) -> int:
        return sum(report.rows_checked for report in self.reports)

    @property
    def calls(self) -> int:
        """Collectives that a rank issued."""
        return len(self.ledgers[0])

    @property
    def fallbacks(self) -> int:
        """Forwards that took the gathered write."""
        return self.reports[0].fallbacks if self.reports else 0


def try_case(world: World, case: Case, setting: Setting = PLAIN, watch: Watch | None = None) -> Verdict:
    """Serve a case and judge it. A run that fails is a finding; a world that is missing is an error."""
    try:
        run, uses = run_quietly(world, _serve_unwarned, case, setting, watch)
    except WorldUnavailable:
        raise
    except RunFailed as failure:
        return Verdict((finding_of(failure),), spans=failure.spans, schedule=failure.schedule)
    findings = tuple(judge(case, run.results, run.ledgers[0]))
    return Verdict(findings, run.results, run.ledgers, run.spans, run.schedule, run.retried, uses)


def run_quietly(
    world: World,
    program: Callable[..., T],
    argument: Any,
    setting: Setting,
    watch: Watch | None = None,
) -> tuple[Run[T], Uses]:
    """A rank program on a world, under a setting, without a warning for each fallback; uses of kernels."""
    if setting.kernels is None:
        return _run(world, program, (argument,), setting, watch), NO_USES
    run = _run(world, with_kernels, (setting.kernels, program, argument), setting, watch)
    results, uses = zip(*run.results, strict=True)
    return replace(run, results=results), sum_of(uses)


def _run(
    world: World, program: Callable[..., Any], args: Sequence[Any], setting: Setting, watch: Watch | None
) -> Run[Any]:
    # Here for ranks that are threads, and in the program for ranks that are processes.
    with fallbacks_unwarned():
        if setting.self_check and world.kind.startswith("lockstep"):
            return world.self_check(program, *args)
        return world.execute(program, *args, watch=watch, faults=setting.faults)


def _serve_unwarned(group: dist.ProcessGroup, case: Case) -> RankReport:
    with fallbacks_unwarned():
        return serve(group, case)


@contextmanager
def fallbacks_unwarned() -> Iterator[None]:
    """The outcome counts fallbacks; a scenario that forbids one says ``write: direct``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        yield


# What broke, where no rank found it: a law, or what the run stood on.
_LAW_OF_FAILURE = {Deadlock: "V6", Diverged: "V6", InfrastructureFailed: INFRASTRUCTURE}


def finding_of(failure: RunFailed) -> Finding:
    """A run that ended without results: where each rank was, and the traceback if there is one."""
    law = next((law for kind, law in _LAW_OF_FAILURE.items() if isinstance(failure, kind)), "crash")
    lines = [failure.received, *([failure.fix] if failure.fix else [])]
    lines += [f"rank {rank}: {position}" for rank, position in enumerate(failure.positions)]
    if isinstance(failure, RankFailed) and failure.traceback:
        lines.append(failure.traceback.rstrip())
    return Finding(law, failure.what, failure.expected, "\n".join(lines), failure.where)


def judge(case: Case, reports: Sequence[RankReport], ledger: Sequence[Call]) -> Iterator[Finding]:
    """What only shows when all ranks are together: findings, equal digests, counts of calls, outputs."""
    yield from folded([finding for report in reports for finding in report.findings])
    odd = [report.rank for report in reports if report.digest != reports[0].digest]
    if odd:
        yield Finding(
            "V1", "digest of views and outputs", "rank 0's", f"another on ranks {odd}", Where(rank=odd[0])
        )
    yield from _judge_views(case, ledger)
    if case.arithmetic is not None:
        yield from judge_numbers(case, case.arithmetic, reports)


def folded(findings: Sequence[Finding]) -> Iterator[Finding]:
    """What several ranks found alike, once."""
    ranks: dict[Finding, list[int | None]] = {}
    for finding in findings:
        ranks.setdefault(replace(finding, where=replace(finding.where, rank=None)), []).append(
            finding.where.rank
        )
    for finding, found_by in ranks.items():
        others = f", on ranks {', '.join(map(str, found_by))}" if len(found_by) > 1 else ""
        where = replace(finding.where, rank=found_by[0])
        yield replace(finding, what=finding.what + others, where=where)


def _judge_views(case: Case, ledger: Sequence[Call]) -> Iterator[Finding]:
    """V8: a cache, layer and forward has one gather of pages, none in current-only reuse (V3)."""
    paths = [
        read_verdict(case.reading, [turn.extent for turn in forward.turns]).path for forward in case.forwards
    ]
    counts = Counter(call.site for call in ledger)
    for cache in case.caches:
        for path, name in ((ViewPath.FULL, "view"), (ViewPath.PARTIAL, "history")):
            site, expected = f"{cache.name.lower()}.{name}", paths.count(path) * case.layers
            if counts[site] != expected:
                yield Finding("V8", "gathers of pages", str(expected), str(counts[site]), Where(site=site))
