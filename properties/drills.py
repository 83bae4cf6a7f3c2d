"""Drills: a history that held is played again with something wrong, which must be noticed.

A rank whose tables are old must be found by what all ranks are compared by (L7), or as it parts from the
others (V6). A rank that is killed must be named, within seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from properties.rehearsal import Rehearsal
from refmodel.errors import Finding, InvalidInput, Where
from sim.engine.stale import KINDS, Stale
from sim.faults.fault import Fault
from sim.gate.histories import try_history, try_stale
from sim.gate.setting import Setting
from sim.gate.verdict import INFRASTRUCTURE, Verdict
from sim.histories.history import History
from sim.world import World

Drill = Stale | Fault

ONCE_IN = {"lockstep": 12, "gloo": 6}  # histories, by world; after a kill, processes start anew
MOST_SECONDS = 30.0  # that a killed rank may stay unnamed
_ALWAYS_HEARD = ("submit", "forward", "decode", "finish", "abort", "send", "resend", "cancel")


def parse_drill(text: str) -> Drill:
    """Of a line such as "unheard rank=1 step=7" or "die rank=1 at=#5"; InvalidInput for any other text."""
    return Stale.parse(text) if text.partition(" ")[0] in KINDS else Fault.parse(text)


def drill_of(rehearsal: Rehearsal, calls: int, luck: int, world: str) -> Drill | None:
    """What to try with a history that held after so many calls a rank; None most of the time.

    ``luck``: what was drawn for it.
    """
    luck, now = divmod(luck, ONCE_IN[world])
    if now != ONCE_IN[world] - 1 or rehearsal.setting.world_size == 1:
        return None
    luck, rank = divmod(luck, rehearsal.setting.world_size)
    if calls and luck % 4 == 0:
        return Fault("die", rank, f"#{luck // 4 % calls}")
    possible = [Stale(kind, rank, step) for kind, step in _effective(rehearsal)]
    return possible[luck % len(possible)] if possible else None


def _effective(rehearsal: Rehearsal) -> Iterator[tuple[str, int]]:
    """Kinds and steps with which old tables are not the new ones."""
    before = (rehearsal.setting.pages_per_lane,) * rehearsal.setting.world_size
    steps = zip(rehearsal.steps, rehearsal.free, rehearsal.extends, strict=True)
    for number, (step, free, extends) in enumerate(steps, start=1):
        if not step.refused and step.name in _ALWAYS_HEARD:
            yield "unheard", number
            if extends:
                yield "extent", number
            if free != before:
                yield "free", number
        before = free


def alike(drill: Drill, rehearsal: Rehearsal, calls: int) -> Iterator[Drill]:
    """What a smaller history, which held after so many calls a rank, offers in the place of ``drill``."""
    size = rehearsal.setting.world_size
    if size == 1:
        return
    rank = min(drill.rank, size - 1)
    if isinstance(drill, Fault):
        if calls:
            yield Fault("die", rank, f"#{min(int(drill.at[1:]), calls - 1)}")
    else:
        yield from (Stale(kind, rank, step) for kind, step in _effective(rehearsal) if kind == drill.kind)


def unnoticed(world: World, history: History, drill: Drill) -> tuple[Finding, ...]:
    """What was not noticed, or not as it must be. None, unless something is broken."""
    start = time.monotonic()
    if isinstance(drill, Stale):
        return tuple(_of_old_tables(try_stale(world, history, drill), drill))
    verdict = try_history(world, history, Setting(faults=(drill,)))
    return tuple(_of_a_death(verdict, drill, time.monotonic() - start))


def _of_old_tables(verdict: Verdict[Any], drill: Stale) -> Iterator[Finding]:
    if not verdict.findings or verdict.findings[0].law == INFRASTRUCTURE:
        received = verdict.findings[0].what if verdict.findings else "nothing"
        yield Finding(
            "L7", f"a drill, {drill.kind}", "a finding", received, Where(step=drill.step, rank=drill.rank)
        )


def _of_a_death(verdict: Verdict[Any], drill: Fault, seconds: float) -> Iterator[Finding]:
    named = [finding for finding in verdict.findings if finding.where.rank == drill.rank]
    if not named:
        received = verdict.findings[0].received if verdict.findings else "nothing"
        yield Finding("V6", "a drill, a killed rank", f"rank {drill.rank} named", received)
    elif seconds > MOST_SECONDS:
        yield Finding("V6", "a drill, a killed rank", "named within seconds", f"after {seconds:.0f} s")


def check_drill(drill: Drill, history: History) -> None:
    """InvalidInput for a drill of a rank or step that the history has not."""
    steps = drill.step if isinstance(drill, Stale) else 1
    if drill.rank >= history.world_size or steps > len(history.history):
        raise InvalidInput(
            "--drill",
            expected=f"ranks 0 … {history.world_size - 1}, steps 1 … {len(history.history)}",
            received=str(drill),
        )
