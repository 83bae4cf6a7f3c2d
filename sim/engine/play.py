"""The rank program: a history, step by step, on one rank. Runs unchanged on every world."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace

import torch.distributed as dist

from refmodel.collectives import rank_and_size
from refmodel.errors import Finding, InvalidInput
from refmodel.serving.lanes import OutOfPages
from sim.engine.engine import Engine
from sim.histories.expect import unexpected
from sim.histories.history import History, Step

MOST_FINDINGS = 5  # a rank stops there; one is enough to fail


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
    with closing(Engine(history, rank, group)) as engine:
        return play_on(engine, history, rank, size)


def play_on(engine: Engine, history: History, rank: int, size: int) -> Played:
    """Play a history on an engine of this rank that has done nothing yet."""
    findings: list[Finding] = []
    fingerprints, refusals = [], []
    for number, step in enumerate(history.history, start=1):
        engine.tables.now = number
        refusal, found = apply(engine, step)
        found += unexpected(engine.tables, step)
        findings += [replace(each, where=replace(each.where, step=number)) for each in found]
        refusals.append(refusal)
        fingerprints.append(engine.tables.fingerprint())
        if len(findings) >= MOST_FINDINGS:
            break
    return Played(
        rank=rank,
        digest=engine.storage.digest.hexdigest(),
        findings=tuple(findings[:MOST_FINDINGS]),
        fingerprints=tuple(fingerprints),
        refusals=tuple(refusals),
        rows_checked=engine.storage.rows_checked,
        free_pages=tuple(engine.tables.lanes.free_pages(lane) for lane in range(size)),
    )


def apply(engine: Engine, step: Step) -> tuple[str | None, list[Finding]]:
    """Do one step: (why it was refused, or None; what was found wrong)."""
    before, found = engine.tables.fingerprint(), engine.storage.findings
    refusal: str | None = None
    try:
        getattr(engine, step.name)(getattr(step, step.name))
    except InvalidInput as refused:
        refusal = str(refused)
        if engine.tables.fingerprint() != before:
            found.append(Finding("L1", f"tables after a refused {step.name}", "as before", "others"))
    except OutOfPages as refused:  # what was evicted before stays so
        refusal = str(refused)
    found, engine.storage.findings = [*found, *engine.tables.check()], []
    return refusal, found
