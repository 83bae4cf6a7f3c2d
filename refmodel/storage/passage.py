"""What one forward reads and writes on one rank: index work done once for all caches and layers (law O1)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from refmodel.collectives import gather_buffers
from refmodel.errors import FallbackWarning, InvalidInput
from refmodel.layout.ownership import PageTable, current_slots, to_physical
from refmodel.layout.plan import Plan
from refmodel.storage.pages import words
from refmodel.storage.reuse import FULL, Reading, ReadVerdict, ViewPath, read_verdict
from refmodel.storage.shard import Destinations, destinations
from refmodel.storage.view import ViewIndex, ViewLayout, view_index, view_layout
from refmodel.storage.write import WritePath, WriteVerdict, write_verdict

_NOTHING = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """One forward on one rank. Build it with :func:`open_passage`; index tensors are on the rank's device."""

    plan: Plan
    rank: int
    write: WriteVerdict
    read: ReadVerdict
    view: ViewLayout  # of all valid tokens, whatever they are read from
    writes: Destinations  # what this rank stores: of its own rows in a direct write, else of all batch rows
    places: torch.Tensor  # [num_rows] batch rows in the gather buffers
    pages: ViewIndex | None  # what is materialized: the view, or its history; else None
    held: Destinations  # view rows that this rank stores, and their slots; empty unless there is no view

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """What was asked for and cannot be, the same on all ranks."""
        gathered = self.write.path is WritePath.GATHERED
        return (
            *((f"gathered write on all ranks: {self.write.reason}",) if gathered else ()),
            *self.read.fallbacks,
        )

    def warn(self) -> int:
        """A :class:`FallbackWarning` for each fallback (O5, V6). Returns their number."""
        for reason in self.fallbacks:
            warnings.warn(reason, FallbackWarning, stacklevel=2)
        return len(self.fallbacks)


def open_passage(
    plan: Plan,
    tables: Sequence[PageTable],
    rank: int,
    *,
    local_pages: int,
    asked: Reading = FULL,
    device: torch.device | None = None,
) -> Passage:
    """The passage of a batch with these page tables, through shards of ``local_pages`` pages.

    :class:`InvalidInput` for tables of another batch: too few, too short, or beyond the shards.
    """
    if len(tables) != len(plan.extents):
        raise InvalidInput(
            "page tables",
            expected=f"{len(plan.extents)}, one a request of the plan",
            received=len(tables),
            fix="Plan and tables must be of the same batch.",
        )
    slots = current_slots(plan, tables)
    physical = to_physical(slots, rank, plan.grid)
    num_slots = local_pages * plan.grid.page_size
    verdict, write = read_verdict(asked, plan.extents), write_verdict(plan, slots)
    written = plan.take(physical, rank) if write.path is WritePath.DIRECT else physical
    view = view_layout(tables, [extent.end for extent in plan.extents], plan.grid)
    return Passage(
        plan=plan,
        rank=rank,
        write=write,
        read=verdict,
        view=view,
        writes=destinations(written, num_slots, rank, device=device),
        places=plan.places.to(device or "cpu"),
        pages=_pages(verdict, view, plan, rank, local_pages, device),
        held=_held(verdict, view, rank, num_slots, device),
    )


def gather_rows(rows: torch.Tensor, passage: Passage, *, group: dist.ProcessGroup, site: str) -> torch.Tensor:
    """Each rank's rows [row_counts[rank], …] → all rows in batch order [num_rows, …] (S4, V6)."""
    buffers = gather_buffers(rows, passage.plan.row_counts, group=group, site=site)
    return in_batch_order(buffers, passage)


def in_batch_order(buffers: torch.Tensor, passage: Passage) -> torch.Tensor:
    """Gather buffers of all ranks [W × max_rank_rows, …] → batch rows [num_rows, …] (S4)."""
    if buffers.dtype is torch.uint8:
        return words(buffers)[passage.places].view(torch.uint8)
    return buffers[passage.places]


def _pages(
    read: ReadVerdict, view: ViewLayout, plan: Plan, rank: int, local_pages: int, device: torch.device | None
) -> ViewIndex | None:
    if read.path in (ViewPath.CURRENT, ViewPath.NONE):
        return None
    if read.path is ViewPath.PARTIAL:
        view = view_layout(view.tables, [extent.prefix for extent in plan.extents], plan.grid)
    return view_index(view, rank, local_pages=local_pages, device=device)


def _held(
    read: ReadVerdict, view: ViewLayout, rank: int, num_slots: int, device: torch.device | None
) -> Destinations:
    if read.path is not ViewPath.NONE:
        return Destinations(_NOTHING, _NOTHING)
    tables = zip(view.tables, view.valid, strict=True)
    slots = torch.cat([table.slots(torch.arange(valid)) for table, valid in tables])
    return destinations(to_physical(slots, rank, view.grid), num_slots, rank, device=device)
