"""Seams of the operations in :mod:`refmodel.ops.layout`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from refmodel.errors import InvalidInput
from refmodel.layout.geometry import Grid
from refmodel.layout.ownership import owned, to_physical
from refmodel.layout.plan import Plan
from refmodel.layout.split import Split
from refmodel.serving.draft import Embedded, embed_local
from refmodel.serving.page_groups import PagePairs, check_page_groups
from refmodel.serving.transfer import Pair, pairs
from refmodel.storage.passage import Passage, in_batch_order
from refmodel.storage.view import CompactTable, drop_tails
from sim.kernels.seams.seam import Kernel, Unsuited, seam

Right = Callable[..., Any]


def shared_metadata(plan: Plan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(prefixes, tokens) of a plan that they say whole: page-aligned, not turned, not padded."""
    if plan.split is not Split.PAGE_ALIGNED or plan.padding or any(plan.rotations):
        raise Unsuited
    extents = plan.extents
    return tuple(extent.prefix for extent in extents), tuple(extent.tokens for extent in extents)


@seam("zigzag_split", Plan.take)
def split_rows(kernel: Kernel, right: Right, plan: Plan, batch: torch.Tensor, rank: int) -> torch.Tensor:
    grid = plan.grid
    rows = batch if batch.dim() == 2 else batch[:, None]
    local = kernel.one(rows, *shared_metadata(plan), rank, grid.world_size, grid.page_size)
    return local if batch.dim() == 2 else local[:, 0]


@seam("rerange", in_batch_order)
def rerange(kernel: Kernel, right: Right, buffers: torch.Tensor, passage: Passage) -> torch.Tensor:
    grid = passage.plan.grid
    return kernel.one(buffers, *shared_metadata(passage.plan), grid.world_size, grid.page_size)


@seam("logical_to_physical", to_physical)
def physical_slots(kernel: Kernel, right: Right, slots: torch.Tensor, rank: int, grid: Grid) -> torch.Tensor:
    return kernel.one(slots, rank, grid.world_size, grid.page_size).to(slots.dtype)


@seam("owner_mask", owned)
def own_slots(kernel: Kernel, right: Right, slots: torch.Tensor, rank: int, grid: Grid) -> torch.Tensor:
    return kernel.one(slots, rank, grid.world_size, grid.page_size)


@seam("tail_mask", drop_tails)
def tails_dropped(
    kernel: Kernel, right: Right, rows: torch.Tensor, valid: Sequence[int], page_size: int
) -> torch.Tensor:
    return rows[kernel.one(torch.tensor(valid, device=rows.device), page_size, len(rows))]


@seam("current_reuse_remap", CompactTable.rows_of)
def rows_of_slots(kernel: Kernel, right: Right, table: CompactTable, slots: torch.Tensor) -> torch.Tensor:
    by_position = torch.empty_like(table.pages).index_put_((table.page_positions,), table.pages)
    rows = kernel.one(slots.flatten(), by_position, 0, table.valid, table.first_row, table.page_size)
    return rows.view(slots.shape).to(slots.dtype)


@seam("transfer_pairs", pairs)
def pairs_to_send(
    kernel: Kernel, right: Right, pages: Sequence[int], first_position: int, rank: int, world_size: int
) -> tuple[Pair, ...]:
    if any(page < world_size for page in pages):  # that is refused, and by the reference
        raise Unsuited
    found = kernel.one(torch.tensor(pages, dtype=torch.int64), first_position, rank, world_size)
    return tuple(Pair(local, position) for local, position in found.tolist())


@seam("validate_page_groups", check_page_groups)
def page_groups(
    kernel: Kernel, right: Right, host: torch.Tensor, device: torch.Tensor, page_size: int
) -> PagePairs:
    if not bool(kernel.one(host, device, page_size)):
        raise InvalidInput("groups of a copy", expected="whole pages", received="what the kernel refuses")
    host_pages, device_pages = ((slots[::page_size] // page_size).tolist() for slots in (host, device))
    return PagePairs(tuple(host_pages), tuple(device_pages))


@seam("local_embedding", embed_local)
def embedded(
    kernel: Kernel, right: Right, table: torch.Tensor, local_ids: torch.Tensor, plan: Plan, rank: int
) -> Embedded:
    if plan.padding or len(local_ids) != plan.row_counts[rank]:  # the operation knows no padding rows
        raise Unsuited
    return Embedded(kernel.one(local_ids, table, plan.max_rank_rows), plan.max_rank_rows)
