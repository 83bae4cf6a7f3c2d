"""The rank program of a server that must not start (laws X1, H6, T6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.distributed as dist

from refmodel.errors import InvalidInput
from sim.engine.engine import Engine
from sim.histories.history import History
from sim.histories.settings import key_of


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the server of a rank did not start."""

    setting: str  # the key of the file that has it
    text: str


@dataclass(frozen=True, slots=True)
class Started:
    """What one rank says of a start. It has read nothing."""

    refusal: Refusal | None  # None: it starts

    digest: ClassVar[str] = ""
    rows_checked: ClassVar[int] = 0


def start(group: dist.ProcessGroup, history: History) -> Started:
    """Start the server of this rank, and stop it."""
    try:
        Engine(history, group.rank(), group).close()
    except InvalidInput as refused:
        return Started(Refusal(key_of(refused), str(refused)))
    return Started(None)
