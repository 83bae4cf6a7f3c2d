"""Getting the rows of a forward into the shards: gathered, or direct where that is allowed (law O5)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist

from refmodel.collectives import all_gather_rows, rank_and_size
from refmodel.errors import FallbackWarning
from refmodel.layout.ownership import owner
from refmodel.layout.plan import Plan
from refmodel.layout.split import Split
from refmodel.storage.shard import Shard


class WritePath(Enum):
    """How current rows reach their owners."""

    DIRECT = "direct"  # each rank writes its own rows; no collective
    GATHERED = "gathered"  # all ranks gather all rows, each keeps what it owns


@dataclass(frozen=True, slots=True)
class Verdict:
    """The write path of a forward, the same on all ranks, and why."""

    path: WritePath
    reason: str


def write_verdict(plan: Plan, slots: torch.Tensor) -> Verdict:
    """Direct only if the plan is page-aligned and every current slot's owner computes its row (O5).

    ``slots`` [num_rows] are the current logical slots. Only shared metadata goes in: no rank of its own.
    """
    if plan.split is not Split.PAGE_ALIGNED:
        return Verdict(WritePath.GATHERED, f"the plan is {plan.split.value}, not page-aligned")
    owners = owner(slots // plan.grid.page_size, plan.grid.world_size)
    elsewhere = (owners != plan.rank_of_row).nonzero().flatten()
    if not len(elsewhere):
        return Verdict(WritePath.DIRECT, "every row is computed by its owner")
    row = int(elsewhere[0])
    return Verdict(
        WritePath.GATHERED,
        f"position {int(plan.positions[row])} of request {int(plan.request_of_row[row])} is computed by rank "
        f"{int(plan.rank_of_row[row])} but page {int(slots[row]) // plan.grid.page_size} belongs to rank "
        f"{int(owners[row])}",
    )


def warn_of_fallback(verdict: Verdict) -> bool:
    """Make a gathered write visible (O5): a :class:`FallbackWarning` with the reason. True if it was one."""
    if verdict.path is WritePath.DIRECT:
        return False
    warnings.warn(f"gathered write on all ranks: {verdict.reason}", FallbackWarning, stacklevel=2)
    return True


def write_current(
    shard: Shard,
    plan: Plan,
    verdict: Verdict,
    local_rows: torch.Tensor,
    physical: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    site: str,
) -> None:
    """Write this rank's part of the current rows.

    ``local_rows`` [row_counts[rank], width] are the rows this rank computed, ``physical`` [num_rows] the
    physical slots of *all* batch rows on this rank (``to_physical`` of the current slots): computed once a
    forward and shared by all caches and layers (O1).
    """
    rank, _ = rank_and_size(group)
    if verdict.path is WritePath.DIRECT:
        shard.write(plan.take(physical, rank), local_rows)
        return
    gathered = all_gather_rows(local_rows, plan.row_counts, group=group, site=site)
    shard.write(physical, plan.rerange(gathered))
