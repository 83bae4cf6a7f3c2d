"""A rank whose tables are old: it did not hear of a step, or keeps a part of what was before it (law L7).

Written ``unheard rank=1 step=7``: what, who, and which step, from 1.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from refmodel.collectives import rank_and_size
from refmodel.errors import InvalidInput
from sim.engine.engine import Engine
from sim.engine.play import Played, play, play_on, started
from sim.engine.tables import Tables
from sim.histories.history import History

# What a rank may be behind with.
KINDS = {
    "unheard": "the rank does not hear of the step",
    "extent": "the rank keeps the lengths of all requests as they were before the step",
    "free": "the rank keeps the free pages of all lanes as they were before the step",
}
_FORM = re.compile(r"(?P<kind>\w+) +rank=(?P<rank>\d+) +step=(?P<step>\d+)")


@dataclass(frozen=True, slots=True)
class Stale:
    """One rank, and the step with which it does not keep up.

    >>> Stale.parse("unheard rank=1 step=7")
    Stale(kind='unheard', rank=1, step=7)
    """

    kind: str  # one of KINDS
    rank: int
    step: int  # from 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.step < 1 or self.rank < 0:
            raise InvalidInput(
                "rank with old tables",
                expected=f"{', '.join(KINDS)}, a rank from 0, a step from 1",
                received=str(self),
            )

    @classmethod
    def parse(cls, text: str) -> Stale:
        """Of a line such as "unheard rank=1 step=7"; InvalidInput for any other text."""
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise InvalidInput(
                "rank with old tables",
                expected='what, who and when, such as "unheard rank=1 step=7"',
                received=repr(text),
                fix=f"What: {', '.join(KINDS)}.",
            )
        return cls(found["kind"], int(found["rank"]), int(found["step"]))

    def __str__(self) -> str:
        return f"{self.kind} rank={self.rank} step={self.step}"


def play_stale(group: dist.ProcessGroup, drill: tuple[History, Stale]) -> Played:
    """Play a history on this rank; :class:`InvalidInput` if it has not that rank or step."""
    history, stale = drill
    rank, size = rank_and_size(group)
    if stale.rank >= size or stale.step > len(history.history):
        raise InvalidInput(
            "rank with old tables",
            expected=f"ranks 0 … {size - 1}, steps 1 … {len(history.history)}",
            received=str(stale),
        )
    if rank != stale.rank:
        return play(group, history)
    with started(history, rank, group) as engine:
        _befall(engine, stale, history.history[stale.step - 1].name)
        return play_on(engine, history, rank, size)


def _befall(engine: Engine, stale: Stale, name: str) -> None:
    """From now on the engine does its step number ``stale.step``, of that name, as such a rank would."""
    operation = getattr(engine, name)

    def altered(argument: Any) -> None:
        if engine.tables.now != stale.step:
            operation(argument)
        elif stale.kind != "unheard":
            restore = _KEPT[stale.kind](engine.tables)
            operation(argument)
            restore()

    setattr(engine, name, altered)


def _lengths(tables: Tables) -> Callable[[], None]:
    before = [(request, request.valid) for request in tables.requests.values()]

    def restore() -> None:
        for request, valid in before:
            request.valid = valid

    return restore


def _free_pages(tables: Tables) -> Callable[[], None]:
    lanes = tables.lanes._lanes
    before = [deque(lane.free) for lane in lanes]

    def restore() -> None:
        for lane, free in zip(lanes, before, strict=True):
            lane.free = free

    return restore


_KEPT = {"extent": _lengths, "free": _free_pages}
