"""Whether the rows of a forward may be written where they are computed, without a gather (law O5)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from refmodel.layout.ownership import owner
from refmodel.layout.plan import Plan
from refmodel.layout.split import Split


class WritePath(Enum):
    """How current rows reach their owners."""

    DIRECT = "direct"  # each rank writes its own rows; no collective
    GATHERED = "gathered"  # all ranks gather all rows, each keeps what it owns


@dataclass(frozen=True, slots=True)
class WriteVerdict:
    """The write path of a forward, the same on all ranks, and why."""

    path: WritePath
    reason: str


def write_verdict(plan: Plan, slots: torch.Tensor) -> WriteVerdict:
    """Direct only if the plan is page-aligned and every current slot's owner computes its row (O5).

    ``slots`` [num_rows] are the current logical slots. Only shared metadata goes in: no rank of its own.
    """
    if plan.split is not Split.PAGE_ALIGNED:
        return WriteVerdict(WritePath.GATHERED, f"the plan is {plan.split.value}, not page-aligned")
    owners = owner(slots // plan.grid.page_size, plan.grid.world_size)
    elsewhere = (owners != plan.rank_of_row).nonzero().flatten()
    if not len(elsewhere):
        return WriteVerdict(WritePath.DIRECT, "every row is computed by its owner")
    row = int(elsewhere[0])
    return WriteVerdict(
        WritePath.GATHERED,
        f"position {int(plan.positions[row])} of request {int(plan.request_of_row[row])} is computed by rank "
        f"{int(plan.rank_of_row[row])} but page {int(slots[row]) // plan.grid.page_size} belongs to rank "
        f"{int(owners[row])}",
    )
