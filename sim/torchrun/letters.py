"""What only the ranks of a started world say, besides the messages of any process."""

from __future__ import annotations

from dataclasses import dataclass

from refmodel.collectives import Call
from refmodel.errors import InvalidInput
from sim.failures import RunFailed


@dataclass(frozen=True, slots=True)
class Begins:
    """It begins a run."""

    program: str  # its name


@dataclass(frozen=True, slots=True)
class Leaves:
    """The launcher has told it to end."""


@dataclass(frozen=True, slots=True)
class Read:
    """It knows how the run ended."""


@dataclass(frozen=True, slots=True)
class Done:
    """The run ended well. Per rank: its packed result, its calls, and when each was issued and finished."""

    results: list[bytes]
    calls: list[list[Call]]
    times: list[tuple[tuple[int, int], ...]]


Verdict = Done | RunFailed | InvalidInput
