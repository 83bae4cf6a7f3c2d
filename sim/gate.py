"""Scenarios on worlds, with verdicts."""

from __future__ import annotations

import shlex
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from refmodel.collectives import Call
from refmodel.errors import CpkvError, FallbackWarning, Finding, InvalidInput, Where
from refmodel.layout.ownership import current_slots
from refmodel.oracle import causal_mla, relative_error
from refmodel.storage.identity import Cache
from refmodel.storage.write import write_verdict
from sim.build import build_case
from sim.case import ATTENTION, Case
from sim.expect import check_expectations
from sim.failures import Deadlock, Diverged, RunFailed, WorldUnavailable
from sim.marks import marks_of
from sim.program import SM_SCALE, RankReport, queries, serve
from sim.scenario import Scenario
from sim.world import Run, Watch, World

FP64_BUDGET = 1e-10  # relative, law A5


@dataclass(frozen=True, slots=True)
class Outcome:
    """One scenario on one world."""

    scenario: Scenario
    world: str  # "lockstep:4"
    seed: int  # of the schedule
    findings: tuple[Finding, ...]
    digest: str = ""  # the same on every world and every run
    seconds: float = 0.0
    rows_checked: int = 0
    calls: int = 0  # collectives a rank issued
    fallbacks: int = 0
    marks: frozenset[str] = frozenset()

    @property
    def held(self) -> bool:
        return not self.findings

    @property
    def replay(self) -> str:
        """The one line that runs this again."""
        return f"cpkv gate {shlex.quote(self.scenario.file)} --world {self.world} --seed {self.seed}"


class Worlds:
    """Worlds by kind and size, started when first asked for and closed together."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._open: dict[str, World] = {}
        self._stack = ExitStack()

    def get(self, kind: str, size: int) -> World:
        name = f"{kind}:{size}"
        if name not in self._open:
            self._open[name] = self._stack.enter_context(World.parse(name, seed=self.seed))
        return self._open[name]

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


def choose_runs(
    scenarios: Sequence[Scenario], worlds: Sequence[str], *, named: bool
) -> list[tuple[Scenario, str]]:
    """Which scenario runs on which kind of world.

    Without ``worlds`` a scenario runs on those it lists. ``gloo`` or ``gloo:4`` picks a kind, and a size; of
    the whole catalogue it takes the scenarios that list that kind, of scenarios ``named`` by the user all.
    """
    if not worlds:
        return [(scenario, kind) for scenario in scenarios for kind in scenario.worlds]
    runs = []
    for world in worlds:
        kind, _, size = world.partition(":")
        World.parse(f"{kind}:{size or 1}").close()  # names a kind that exists, or says what does
        for scenario in scenarios:
            fits = not size or int(size) == scenario.world_size
            if fits and (named or kind == "lockstep" or kind in scenario.worlds):
                runs.append((scenario, kind))
    if not runs:
        sizes = sorted({scenario.world_size for scenario in scenarios})
        raise InvalidInput(
            "--world",
            expected=f"a world that fits a scenario: world sizes {sizes}",
            received=", ".join(worlds),
            fix="The world size is part of a scenario; leave it out, or name the one it has.",
        )
    return runs


def run_all(runs: Iterable[tuple[Scenario, str]], worlds: Worlds) -> Iterator[Outcome]:
    """Run one after the other; a digest that differs between worlds is a finding of the later one."""
    digests: dict[str, tuple[str, str]] = {}
    for scenario, kind in runs:
        outcome = run_scenario(scenario, worlds.get(kind, scenario.world_size), seed=worlds.seed)
        first_world, first_digest = digests.setdefault(scenario.file, (outcome.world, outcome.digest))
        if outcome.held and first_digest and outcome.digest != first_digest:
            differs = Finding(
                "V6", "digest", f"{first_digest[:16]}… as on {first_world}", outcome.digest[:16]
            )
            outcome = _with_findings(outcome, differs)
        yield outcome


def _with_findings(outcome: Outcome, *findings: Finding) -> Outcome:
    return replace(outcome, findings=(*outcome.findings, *findings))


def run_scenario(scenario: Scenario, world: World, *, seed: int = 0) -> Outcome:
    """Run one scenario: work it out, compare its worked numbers, serve it on the world, judge."""
    start = time.perf_counter()
    case = build_case(scenario)
    findings = list(check_expectations(scenario, case))
    reports: tuple[RankReport, ...] = ()
    ledger: tuple[Call, ...] = ()
    try:
        run = serve_quietly(world, case)
        reports, ledger = run.results, run.ledgers[0]
        findings += judge(case, reports, ledger)
    except WorldUnavailable:
        raise
    except RunFailed as failure:
        findings.append(finding_of(failure))
    return Outcome(
        scenario=scenario,
        world=str(world),
        seed=seed,
        findings=tuple(findings),
        digest=reports[0].digest if reports else "",
        seconds=time.perf_counter() - start,
        rows_checked=sum(report.rows_checked for report in reports),
        calls=len(ledger),
        fallbacks=reports[0].fallbacks if reports else 0,
        marks=frozenset(_marks(case)),
    )


def serve_quietly(world: World, case: Case, watch: Watch | None = None) -> Run[RankReport]:
    """Serve a case without a warning for each fallback. Raises what :meth:`World.execute` raises."""
    # Here for ranks that are threads, and in the program for ranks that are processes.
    with _fallbacks_unwarned():
        return world.execute(_serve_quietly, case, watch=watch)


def _serve_quietly(group: dist.ProcessGroup, case: Case) -> RankReport:
    with _fallbacks_unwarned():
        return serve(group, case)


@contextmanager
def _fallbacks_unwarned() -> Iterator[None]:
    """The outcome counts fallbacks; a scenario that forbids one says ``write: direct``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        yield


def finding_of(failure: RunFailed) -> Finding:
    """A run that ended without results, as a finding."""
    law = "V6" if isinstance(failure, (Deadlock, Diverged)) else "crash"
    # What a failure says beyond its first line: where each rank was, and the traceback.
    details = str(failure).removeprefix(CpkvError.__str__(failure))
    advice = f"\n{failure.fix}" if failure.fix else ""
    return Finding(law, failure.what, failure.expected, f"{failure.received}{advice}{details}", failure.where)


def judge(case: Case, reports: Sequence[RankReport], ledger: Sequence[Call]) -> Iterator[Finding]:
    """What only shows when all ranks are together: findings, equal digests, counts of calls, outputs."""
    yield from _folded([finding for report in reports for finding in report.findings])
    odd = [report.rank for report in reports if report.digest != reports[0].digest]
    if odd:
        yield Finding(
            "V1", "digest of views and outputs", "rank 0's", f"another on ranks {odd}", Where(rank=odd[0])
        )
    yield from _judge_views(case, ledger)
    if "attention" in case.checks:
        yield from _judge_outputs(case, reports[0].outputs)


def _folded(findings: Sequence[Finding]) -> Iterator[Finding]:
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
    """V8: one view a cache, layer and forward; neither more nor fewer."""
    counts = Counter(call.site for call in ledger)
    for cache in case.caches:
        site = f"{cache.name.lower()}.view"
        expected = len(case.forwards) * case.layers
        if counts[site] != expected:
            yield Finding("V8", "gathers of a view", str(expected), str(counts[site]), Where(site=site))


def _judge_outputs(case: Case, outputs: Sequence[torch.Tensor]) -> Iterator[Finding]:
    """A5: the outputs of all real rows, against the dense oracle."""
    passes = ((forward, layer) for forward in case.forwards for layer in range(case.layers))
    for (forward, layer), output in zip(passes, outputs, strict=True):
        first = 0
        for turn in forward.turns:
            tags = turn.tags(layer, Cache.QUERY)[turn.extent.prefix :]
            kv = case.format.encode(turn.tags(layer, Cache.KV))
            truth = causal_mla(
                queries(tags).numpy(),
                kv.numpy().astype(np.float64),
                turn.extent.prefix,
                latent=ATTENTION.latent,
                sm_scale=SM_SCALE,
            )
            actual = output[first : first + turn.extent.tokens].numpy()
            first += turn.extent.tokens
            error = relative_error(actual, truth)
            if not error <= FP64_BUDGET:
                where = Where(step=forward.step, request=turn.name, layer=layer)
                yield Finding(
                    "A5", "relative error of the output", f"<= {FP64_BUDGET}", f"{error:.3g}", where
                )


def _marks(case: Case) -> Iterator[str]:
    for forward in case.forwards:
        plan = forward.plan(case.grid, case.split)
        yield from marks_of(plan, write_verdict(plan, current_slots(plan, forward.tables)))
