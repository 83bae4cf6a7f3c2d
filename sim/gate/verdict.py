"""A rank program on a world, judged: findings, and what each rank says, whatever it serves."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch.distributed as dist

from refmodel.collectives import Call
from refmodel.errors import FallbackWarning, Finding
from sim.failures import (
    Deadlock,
    Diverged,
    InfrastructureFailed,
    RankFailed,
    RunFailed,
    WorldUnavailable,
)
from sim.gate.setting import PLAIN, Setting
from sim.kernels.in_place import with_kernels
from sim.kernels.uses import NO_USES, Uses, sum_of
from sim.surface.recorder import Span
from sim.world import Run, Watch, World

INFRASTRUCTURE = "infrastructure"  # stands where a law would, when nothing can be said about the program


class Said(Protocol):
    """What a rank says at the end, whatever it did."""

    @property
    def digest(self) -> str:
        """Of all that it saw, in order."""

    @property
    def rows_checked(self) -> int: ...


S = TypeVar("S", bound=Said)
Judge = Callable[[Run[S]], Iterable[Finding]]


@dataclass(frozen=True, slots=True, eq=False)
class Verdict(Generic[S]):
    """What came of a run."""

    findings: tuple[Finding, ...]
    said: tuple[S, ...] = ()  # by each rank; nothing if the run ended without results
    ledgers: tuple[tuple[Call, ...], ...] = ((),)
    spans: tuple[tuple[Span, ...], ...] = ()
    schedule: str = ""  # the token that replays it; of lockstep only
    retried: bool = False
    uses: Uses = NO_USES  # of kernels, by all ranks

    @property
    def digest(self) -> str:
        """The same on every rank, world and run; empty if there is none."""
        return self.said[0].digest if self.said else ""

    @property
    def rows_checked(self) -> int:
        return sum(each.rows_checked for each in self.said)

    @property
    def calls(self) -> int:
        """Collectives that a rank issued."""
        return len(self.ledgers[0])


def try_program(
    world: World,
    program: Callable[[dist.ProcessGroup, Any], S],
    argument: object,
    judge: Judge[S],
    setting: Setting = PLAIN,
    watch: Watch | None = None,
) -> Verdict[S]:
    """Run a program and judge it. A run that fails is a finding; a world that is missing is an error.

    ``judge`` gets what ranks said only if all of them came to the end.
    """
    try:
        run, uses = _with_uses(world, program, argument, setting, watch)
    except WorldUnavailable:
        raise
    except RunFailed as failure:
        return Verdict((finding_of(failure),), spans=failure.spans, schedule=failure.schedule)
    findings = tuple(judge(run))
    return Verdict(findings, run.results, run.ledgers, run.spans, run.schedule, run.retried, uses)


def _with_uses(
    world: World, program: Callable[..., S], argument: object, setting: Setting, watch: Watch | None
) -> tuple[Run[S], Uses]:
    if setting.kernels is None:
        return _run(world, _unwarned, (program, argument), setting, watch), NO_USES
    run = _run(world, with_kernels, (setting.kernels, _unwarned, program, argument), setting, watch)
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


def _unwarned(group: dist.ProcessGroup, program: Callable[..., S], argument: object) -> S:
    with fallbacks_unwarned():
        return program(group, argument)


@contextmanager
def fallbacks_unwarned() -> Iterator[None]:
    """The outcome counts fallbacks; a scenario that forbids one says ``write: direct``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        yield


# -- findings ----------------------------------------------------------------------------------------------

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


def folded(findings: Iterable[Finding]) -> Iterator[Finding]:
    """What several ranks found alike, once."""
    ranks: dict[Finding, dict[int | None, None]] = {}
    for finding in findings:
        place = replace(finding, where=replace(finding.where, rank=None))
        ranks.setdefault(place, {})[finding.where.rank] = None
    for finding, by_rank in ranks.items():
        found_by = list(by_rank)
        others = f", on ranks {', '.join(map(str, found_by))}" if len(found_by) > 1 else ""
        where = replace(finding.where, rank=found_by[0])
        yield replace(finding, what=finding.what + others, where=where)
