"""The tables of all ranks without bytes: whether they stay equal, seen in a fraction of a play (law L7)."""

from __future__ import annotations

from properties.rehearsal.dry import DryEngine
from refmodel.errors import CpkvError, Finding, Where
from sim.histories.history import History, Step


def drifted(history: History) -> tuple[Finding, ...]:
    """The first step after which ranks know different things. None, unless something is broken."""
    engines = [DryEngine(history) for _ in range(history.world_size)]
    for number, step in enumerate(history.history, start=1):
        refusals = {_done(engine, step, number) for engine in engines}
        known = {engine.tables.fingerprint() for engine in engines}
        for what, values in (("refusal of", refusals), ("tables after", known)):
            if len(values) > 1:
                where = Where(step=number)
                return (Finding("L7", f"{what} {step.name}", "rank 0's", "another", where),)
    return ()


def _done(engine: DryEngine, step: Step, number: int) -> str | None:
    engine.tables.now = number
    try:
        getattr(engine, step.name)(getattr(step, step.name))
    except CpkvError as refused:
        return str(refused)
    return None
