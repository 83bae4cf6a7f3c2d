"""The rank program of a server that must not start (laws X1, H6, T6)."""

from __future__ import annotations

from dataclasses import dataclass

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


def start(group: dist.ProcessGroup, history: History) -> Refusal | None:
    """Start the server of this rank, and stop it: None, or why it does not start."""
    try:
        Engine(history, group.rank(), group).close()
    except InvalidInput as refused:
        return Refusal(key_of(refused), str(refused))
    return None
