"""A candidate of a collective operation, tried on all ranks of a world (laws S4, V1, V6).

Each rank calls it as :mod:`properties.kernels.trial` does on one: in guarded memory, three times, before the
reference. A rank that leaves a collective out, or calls another, is named by the world and never hangs. Every
rank's results are judged, and all ranks must have the same.

On lockstep a candidate is a function like any other. Where ranks are processes each of them loads it by its
name.

>>> from properties.kernels.cases.collective import GatherRerange
>>> from sim.kernels.candidate import Candidate
>>> def gather_rerange(local, prefixes, tokens, page_size, group):
...     return local  # as if it were alone
>>> case = GatherRerange(world=2, page=4, prefixes=(0,), tokens=(8,))
>>> finding = try_case(Candidate(case.op, gather_rerange), case, World.lockstep(2))
>>> finding.law, finding.expected, finding.received, finding.where.rank
('shape', '[8, 3]', '[4, 3]', 0)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist

from properties.kernels import faults
from properties.kernels.cases.case import Case
from properties.kernels.cases.collective import AcrossCase
from properties.kernels.handling import PLAIN, Handling
from properties.kernels.trial import Running, Trial
from refmodel.collectives import device_of
from refmodel.errors import Finding, InvalidInput, Where
from refmodel.ops.catalogue import OPS
from refmodel.ops.op import Results
from sim.failures import Deadlock, Diverged, RankFailed, RunFailed, TimedOut
from sim.kernels.candidate import Candidate
from sim.kernels.loading import Named
from sim.world import World

# Of the runs of a trial: the first, one with other values, the first again. Any more are repeats of the last.
_SEEDS = (0, 1, 0)


def try_case(
    candidate: Candidate,
    case: AcrossCase,
    world: World,
    handling: Handling = PLAIN,
    *,
    named: Named | None = None,
    running: Running = nullcontext,
) -> Finding | None:
    """The first fault of a candidate with one case on a world; None if there is none.

    ``named``: what the candidate was loaded from; needed where ranks are processes. ``running`` is entered
    while ranks run. ``law`` of a finding is a law (V6: the ranks did not call alike) or a word of
    :mod:`properties.kernels.faults`; ``where`` has the rank. :class:`InvalidInput` if the case is of another
    number of ranks. A world that is missing, or that broke twice, is raised, and so is what the case or the
    reference raises: no fault of the candidate's.
    """
    if case.world != world.size:
        raise InvalidInput("ranks of a case", expected=f"{world.size}, as {world} has", received=case.world)
    try:
        with running():
            tried = world.run(_try, named or candidate, case, handling)
    except (Deadlock, Diverged, RankFailed, TimedOut) as failure:
        if isinstance(failure.__cause__, torch.OutOfMemoryError):
            raise failure.__cause__ from None
        return _finding_of(failure)
    return next(_findings(case, tried), None)


# -- on each rank ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tried:
    """What came of a candidate on one rank."""

    runs: tuple[tuple[str, Results], ...]  # names and outcomes, on the CPU
    fault: Finding | None  # that shows without any judge


@dataclass(frozen=True)
class _OfRank:
    """An across-case as a trial takes it: one rank's arguments, the group among them."""

    case: AcrossCase
    group: dist.ProcessGroup
    seed: int

    def arguments(self) -> dict[str, Any]:
        mine = replace(self.case, seed=self.seed).arguments_of(self.group.rank())
        return {**mine, "group": self.group}


def _try(group: dist.ProcessGroup, given: Candidate | Named, case: AcrossCase, handling: Handling) -> _Tried:
    candidate = given.candidate(case.op.name) if isinstance(given, Named) else given
    raised: list[BaseException] = []

    @contextmanager
    def noting() -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            raised.append(error)
            raise

    trial = Trial(candidate, device_of(group).type, noting)
    done, fault = [], None
    mine = _OfRank(case, group, case.seed)
    large = case == type(case).huge()  # too large for more than one run
    runs = [trial.run(mine.arguments())] if large else trial.runs(cast("Case", mine), handling)
    for run in runs:
        if raised:  # that ends a rank, and the world says of all the others where they were
            raise raised[0]
        # After any other fault this rank goes on: the others wait for the calls of the runs to come.
        fault = fault or run.fault
        done.append((run.name, run.outcome))
    return _Tried(tuple(done), fault)


def _right(group: dist.ProcessGroup, case: AcrossCase) -> Results:
    return OPS[case.op.name].reference(**case.arguments_of(group.rank()), group=group)


# -- judged together ---------------------------------------------------------------------------------------


def _finding_of(failure: RunFailed) -> Finding:
    """A run that ended without results."""
    if isinstance(failure, RankFailed):
        kind = faults.RAISES if failure.traceback else faults.CRASH
        return Finding(
            kind, failure.what, "results", failure.traceback.rstrip() or failure.received, failure.where
        )
    lines = [failure.received, *([failure.fix] if failure.fix else [])]
    lines += [f"rank {rank}: {position}" for rank, position in enumerate(failure.positions)]
    kind = faults.HANG if isinstance(failure, TimedOut) else "V6"
    return Finding(kind, failure.what, failure.expected, "\n".join(lines), failure.where)


def _findings(case: AcrossCase, tried: Sequence[_Tried]) -> Iterator[Finding]:
    for rank, each in enumerate(tried):
        if each.fault is not None:
            yield replace(each.fault, where=replace(each.fault.where, rank=rank))
    for number, runs in enumerate(zip(*(each.runs for each in tried), strict=True)):
        name, outcomes = runs[0][0], [outcome for _, outcome in runs]
        if number < len(_SEEDS):
            found = _judged(replace(case, seed=case.seed + _SEEDS[number]), outcomes)
        else:
            found = _repeated(outcomes, [each.runs[len(_SEEDS) - 1][1] for each in tried])
        for finding in found:
            yield replace(finding, what=f"{finding.what}, {name}" if name else finding.what)


def _judged(case: AcrossCase, outcomes: Sequence[Results]) -> Iterator[Finding]:
    expected = World.lockstep(case.world).run(_right, case)
    for rank, (received, right) in enumerate(zip(outcomes, expected, strict=True)):
        finding = case.op.judge(case.arguments_of(rank), received, right)
        if finding is not None:
            yield replace(finding, where=replace(finding.where, rank=rank))
    # A judge that allows for rounding would allow each rank another result.
    for rank, received in enumerate(outcomes):
        if not _equal(received, outcomes[0]):
            expected_bits = "the same bits on every rank"
            yield Finding(case.op.laws[0], "results", expected_bits, "others than rank 0's", Where(rank=rank))


def _repeated(outcomes: Sequence[Results], before: Sequence[Results]) -> Iterator[Finding]:
    for rank, (one, other) in enumerate(zip(before, outcomes, strict=True)):
        if not _equal(one, other):
            same, others = "the same bits every time", "other bits at times"
            yield Finding(faults.REPEAT, "results", same, others, Where(rank=rank))


def _equal(one: Results, other: Results) -> bool:
    """Bit for bit."""
    pairs = zip(one, other, strict=True)
    return all(torch.equal(_bits(left), _bits(right)) for left, right in pairs)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
