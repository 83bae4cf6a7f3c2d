"""Operations that ranks do together: a gather, and what comes of it (laws S4, V1, V2, V6, V8).

Every rank calls them, with rows or pages and without, and every rank gets the same result. Rank and world
size are the group's. All arguments but the rank's own tensor are shared metadata.
"""

from __future__ import annotations

from math import prod

import torch
import torch.distributed as dist

from refmodel.collectives import current_site, gather_buffers, rank_and_size
from refmodel.layout.geometry import Grid, num_pages
from refmodel.layout.ownership import PageTable
from refmodel.ops.judges import equal_bytes
from refmodel.ops.layout import PAGE_SIZE, PREFIXES, TOKENS, page_aligned_plan
from refmodel.ops.op import Argument, Cost, Kind, Op, Result, Results, Space
from refmodel.ops.storage import raw_format
from refmodel.storage.shard import Shard
from refmodel.storage.view import materialize, view_index, view_layout

Ints = tuple[int, ...]


def _gather_rerange(
    local: torch.Tensor, prefixes: Ints, tokens: Ints, page_size: int, group: dist.ProcessGroup
) -> Results:
    plan = page_aligned_plan(prefixes, tokens, group.size(), page_size)
    site = current_site() or "gather_rerange"
    return (plan.rerange(gather_buffers(local, plan.row_counts, group=group, site=site)),)


GATHER_RERANGE = Op(
    name="gather_rerange",
    meaning="The rows of each rank → all rows in batch order, on every rank: a padded gather, and rerange.",
    arguments=(
        Argument("local", Kind.VALUES, "rows of this rank, prev before next; none is normal", "[n, width]"),
        PREFIXES,
        TOKENS,
        PAGE_SIZE,
        Argument("group", Kind.GROUP, "its ranks split the batch"),
    ),
    results=(Result("rows", "[sum(tokens), width]", "in batch order; padding never leaks"),),
    reference=_gather_rerange,
    spaces=lambda local, prefixes, tokens, page_size, group: (
        Space((sum(tokens), *local.shape[1:]), local.dtype),
    ),
    judge=equal_bytes("S4"),
    compared="byte for byte",
    laws=("S1", "S3", "S4", "V6"),
    cost=lambda local, prefixes, tokens, page_size, group: Cost(
        2 * sum(tokens) * prod(local.shape[1:]) * local.itemsize
    ),
    collective=True,
    row_width=lambda local, prefixes, tokens, page_size, group: local.shape[-1],
)


def _gather_materialize(
    shard: torch.Tensor,
    page_table: torch.Tensor,
    valid: Ints,
    page_size: int,
    fields: Ints,
    group: dist.ProcessGroup,
) -> Results:
    rank, size = rank_and_size(group)
    grid = Grid(size, page_size)
    rows = page_table.to("cpu", torch.int64)
    tables = [
        PageTable(row[: num_pages(tokens, page_size)], grid) for row, tokens in zip(rows, valid, strict=True)
    ]
    index = view_index(view_layout(tables, valid, grid), rank, local_pages=len(shard), device=shard.device)
    pages = Shard(grid, rank, raw_format(fields), shard.contiguous())
    return (materialize(pages, index, group=group, site=current_site() or "gather_materialize"),)


GATHER_MATERIALIZE = Op(
    name="gather_materialize",
    meaning="The pages of each rank → the dense view of all requests, on every rank: one gather.",
    arguments=(
        Argument(
            "shard",
            Kind.VALUES,
            "pages that this rank stores, local page 0 being a dummy; of a page, field 0 of all its tokens, "
            "then field 1, …",
            "[local pages, page bytes]",
            (torch.uint8,),
        ),
        Argument(
            "page_table",
            Kind.INDEX,
            "logical pages of each request, by position; −1 behind them",
            "[requests, most pages]",
        ),
        Argument("valid", Kind.INTS, "tokens of each request", "[requests]"),
        PAGE_SIZE,
        Argument("fields", Kind.INTS, "bytes a token of each field"),
        Argument("group", Kind.GROUP, "its ranks store the pages: logical page g is on rank g mod W"),
    ),
    results=(Result("view", "[sum(valid), sum(fields)]", "in batch and position order, tails masked"),),
    reference=_gather_materialize,
    spaces=lambda shard, page_table, valid, page_size, fields, group: (
        Space((sum(valid), sum(fields)), torch.uint8),
    ),
    judge=equal_bytes("V1"),
    compared="byte for byte",
    laws=("V1", "V2", "V6", "V7", "V8", "O1", "F2"),
    cost=lambda shard, page_table, valid, page_size, fields, group: Cost(2 * sum(valid) * sum(fields)),
    collective=True,
    row_width=lambda shard, page_table, valid, page_size, fields, group: sum(fields),
)
