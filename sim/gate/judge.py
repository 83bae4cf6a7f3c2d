"""One case on one world, judged: what each rank found, and what only shows when all are together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from refmodel.collectives import Call
from refmodel.errors import Finding, Where
from refmodel.storage.reuse import ViewPath, read_verdict
from sim.cases.case import Case
from sim.gate.numbers import judge_numbers
from sim.gate.setting import PLAIN, Setting
from sim.gate.verdict import Verdict, folded, try_program
from sim.serving.program import serve
from sim.serving.report import RankReport
from sim.world import Watch, World


def try_case(
    world: World, case: Case, setting: Setting = PLAIN, watch: Watch | None = None
) -> Verdict[RankReport]:
    """Serve a case and judge it. A run that fails is a finding; a world that is missing is an error."""
    return try_program(
        world, serve, case, lambda run: judge(case, run.results, run.ledgers[0]), setting, watch
    )


def fallbacks_of(verdict: Verdict[RankReport]) -> int:
    """Forwards that took the gathered write."""
    return verdict.said[0].fallbacks if verdict.said else 0


def judge(case: Case, reports: Sequence[RankReport], ledger: Sequence[Call]) -> Iterator[Finding]:
    """What only shows when all ranks are together: findings, equal digests, counts of calls, outputs."""
    yield from folded(finding for report in reports for finding in report.findings)
    odd = [report.rank for report in reports if report.digest != reports[0].digest]
    if odd:
        yield Finding(
            "V1", "digest of views and outputs", "rank 0's", f"another on ranks {odd}", Where(rank=odd[0])
        )
    yield from _judge_views(case, ledger)
    if case.arithmetic is not None:
        yield from judge_numbers(case, case.arithmetic, reports)


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
