"""The rank program: a history, step by step, on one rank. Runs unchanged on every world."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from refmodel.collectives import rank_and_size
from refmodel.errors import Finding, InvalidInput
from refmodel.serving.lanes import OutOfPages
from sim.engine.engine import Engine
from sim.histories.expect import unexpected
from sim.histories.history import History, Step

MOST_FINDINGS = 5  # that a rank tells of; it plays on, as others would wait for its collectives


@dataclass(frozen=True, slots=True)
class Played:
    """What one rank says of a history."""

    rank: int
    digest: str  # of every view, in order
    findings: tuple[Finding, ...]
    fingerprints: tuple[int, ...]  # of the tables, after each step
    refusals: tuple[str | None, ...]  # of each step: why it was refused
    rows_checked: int
    free_pages: tuple[int, ...]  # of each lane, at the end


def play(group: dist.ProcessGroup, history: History) -> Played:
    """Play a history on this rank."""
    rank, size = rank_and_size(group)
    if size != history.world_size:
        raise InvalidInput("world of a history", expected=f"{history.world_size} ranks", received=size)
    with started(history, rank, group) as engine:
        return play_on(engine, history, rank, size)


@contextmanager
def started(history: History, rank: int, group: dist.ProcessGroup) -> Iterator[Engine]:
    """An engine of this rank that has done nothing yet; closed behind the block."""
    # As an engine does that only serves; without, torch counts versions of tensors for a tenth of the time.
    with torch.inference_mode(), closing(Engine(history, rank, group)) as engine:
        yield engine


def play_on(engine: Engine, history: History, rank: int, size: int) -> Played:
    """Play a history on an engine of this rank that has done nothing yet."""
    findings: list[Finding] = []
    fingerprints, refusals = [], []
    before = engine.tables.fingerprint()
    for number, step in enumerate(history.history, start=1):
        engine.tables.now = number
        done = apply(engine, step, before)
        found = [*done.findings, *unexpected(engine.tables, step)]
        # Tables with equal fingerprints are alike: after each step one rank looks, after the last all do.
        if number % size == rank or number == len(history.history):
            found += engine.tables.check()
        findings += [replace(each, where=replace(each.where, step=number)) for each in found]
        refusals.append(done.refusal)
        fingerprints.append(done.fingerprint)
        before = done.fingerprint
    return Played(
        rank=rank,
        digest=engine.storage.digest.hexdigest(),
        findings=tuple(findings[:MOST_FINDINGS]),
        fingerprints=tuple(fingerprints),
        refusals=tuple(refusals),
        rows_checked=engine.storage.rows_checked,
        free_pages=engine.tables.lanes.all_free(),
    )


@dataclass(frozen=True, slots=True)
class Done:
    """What came of one step."""

    refusal: str | None  # why it was refused
    findings: tuple[Finding, ...]  # of bytes, and of tables that a refused step changed
    fingerprint: int  # of the tables, afterwards


def apply(engine: Engine, step: Step, before: int | None = None) -> Done:
    """Do one step. ``before``: the fingerprint of the tables, for those who know it."""
    if before is None:
        before = engine.tables.fingerprint()
    refusal, unchanged = attempt(engine, step)
    after, found = engine.tables.fingerprint(), engine.storage.findings
    if unchanged and after != before:
        found.append(Finding("L1", f"tables after a refused {step.name}", "as before", "others"))
    engine.storage.findings = []
    return Done(refusal, tuple(found), after)


def attempt(engine: Engine, step: Step) -> tuple[str | None, bool]:
    """Do one step: (why it was refused, whether it then must have changed nothing)."""
    try:
        getattr(engine, step.name)(getattr(step, step.name))
    except InvalidInput as refused:
        return str(refused), True
    except OutOfPages as refused:  # what was evicted before stays so
        return str(refused), False
    return None, False
