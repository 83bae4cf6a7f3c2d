"""Wrong kernels of the operations in :mod:`refmodel.ops.collective`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from properties.kernels.adversaries.adversary import adversary
from refmodel.layout.geometry import Extent, Grid, ceil_div, coverage, num_pages
from refmodel.layout.plan import Plan, plan_batch
from refmodel.layout.rows import pad_rows, trim_rows
from refmodel.layout.split import Split

Ints = tuple[int, ...]


def _plan(
    prefixes: Ints, tokens: Ints, page_size: int, group: dist.ProcessGroup, split: Split = Split.PAGE_ALIGNED
) -> Plan:
    extents = [Extent(prefix, count) for prefix, count in zip(prefixes, tokens, strict=True)]
    return plan_batch(extents, Grid(group.size(), page_size), split)


def _gathered(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Of all ranks, each as long as this one's."""
    parts = [torch.empty_like(rows) for _ in range(group.size())]
    dist.all_gather(parts, rows.contiguous(), group=group)
    return torch.cat(parts)


# -- gather_rerange ----------------------------------------------------------------------------------------


def _rerange(
    local: torch.Tensor, plan: Plan, group: dist.ProcessGroup, length: int | None = None
) -> torch.Tensor:
    return plan.rerange(_gathered(pad_rows(local, length or plan.max_rank_rows), group))


@adversary("gather_rerange", law="V6")
def skips_without_rows(
    local: torch.Tensor, prefixes: Ints, tokens: Ints, page_size: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """A rank without rows leaves the gather out."""
    if not len(local):
        return local.new_zeros(sum(tokens), *local.shape[1:])
    return _rerange(local, _plan(prefixes, tokens, page_size, group), group)


@adversary("gather_rerange", law="V6")
def gathers_unpadded(
    local: torch.Tensor, prefixes: Ints, tokens: Ints, page_size: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Each rank sends as many rows as it has: right only for even splits."""
    plan = _plan(prefixes, tokens, page_size, group)
    return _gathered(local, group)[torch.argsort(plan.gather_order).to(local.device)]


@adversary("gather_rerange", law="S4")
def buffers_of_the_average(
    local: torch.Tensor, prefixes: Ints, tokens: Ints, page_size: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Buffers hold ceil(n / W) rows; what does not fit is cut off."""
    plan = _plan(prefixes, tokens, page_size, group)
    length = ceil_div(sum(tokens), group.size())
    buffers = _gathered(pad_rows(local[:length], length), group).unflatten(0, (group.size(), length))
    longest = [pad_rows(buffer, max(length, plan.max_rank_rows)) for buffer in buffers]
    return plan.rerange(torch.cat([buffer[: plan.max_rank_rows] for buffer in longest]))


@adversary("gather_rerange", law="S4")
def ranks_from_the_last(
    local: torch.Tensor, prefixes: Ints, tokens: Ints, page_size: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Takes the last rank's buffer for the first's."""
    plan = _plan(prefixes, tokens, page_size, group)
    buffers = _gathered(pad_rows(local, plan.max_rank_rows), group)
    return plan.rerange(buffers.unflatten(0, (group.size(), -1)).flip(0).flatten(0, 1))


@adversary("gather_rerange", law="S4")
def rows_in_rank_order(
    local: torch.Tensor, prefixes: Ints, tokens: Ints, page_size: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Rows of rank 0, then of rank 1: the next segments are not put behind all the prev ones."""
    plan = _plan(prefixes, tokens, page_size, group)
    return trim_rows(_gathered(pad_rows(local, plan.max_rank_rows), group), plan.row_counts)


@adversary("gather_rerange", law="S4")
def prefix_forgotten(
    local: torch.Tensor, prefixes: Ints, tokens: Ints, page_size: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Pages are counted from the first new token: right only for prefixes that fill their pages."""
    rows = _plan(prefixes, tokens, page_size, group).max_rank_rows
    counted = _plan((0,) * len(tokens), tokens, page_size, group)
    length = max(rows, counted.max_rank_rows)
    buffers = _gathered(pad_rows(local, length), group).unflatten(0, (group.size(), length))
    return counted.rerange(buffers[:, : counted.max_rank_rows].flatten(0, 1))


@adversary("gather_rerange", law="S4")
def split_by_tokens(
    local: torch.Tensor, prefixes: Ints, tokens: Ints, page_size: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Puts the rows back as a token-balanced split would have them: right only for whole units."""
    rows = _plan(prefixes, tokens, page_size, group).max_rank_rows
    balanced = _plan(prefixes, tokens, page_size, group, Split.TOKEN_BALANCED)
    length = max(rows, balanced.max_rank_rows)
    buffers = _gathered(pad_rows(local, length), group).unflatten(0, (group.size(), length))
    return balanced.rerange(buffers[:, : balanced.max_rank_rows].flatten(0, 1))


@adversary("gather_rerange", law="V6")
def halves_in_their_own_order(
    local: torch.Tensor, prefixes: Ints, tokens: Ints, page_size: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Gathers prev and next one after the other, and odd ranks the other way round."""
    plan = _plan(prefixes, tokens, page_size, group)
    prev, following = plan.cut(local, group.rank())
    sizes = [[len(half.rows) for half in plan.halves(rank)] for rank in range(group.size())]
    lengths = [max(of_rank[which] for of_rank in sizes) for which in (0, 1)]
    order = (1, 0) if group.rank() % 2 else (0, 1)
    halves = [local, local]
    for which in order:
        halves[which] = _gathered(pad_rows((prev, following)[which], lengths[which]), group)
    rows = [
        buffer[: sizes[rank][which]]
        for rank in range(group.size())
        for which in (0, 1)
        for buffer in [halves[which].unflatten(0, (group.size(), lengths[which]))[rank]]
    ]
    return torch.cat(rows)[torch.argsort(plan.gather_order).to(local.device)]


# -- gather_materialize ------------------------------------------------------------------------------------


def _pages(page_table: torch.Tensor, valid: Ints, page_size: int) -> torch.Tensor:
    """Logical pages of all requests, in batch and position order."""
    rows = zip(page_table.long().cpu(), valid, strict=True)
    return torch.cat([row[: num_pages(tokens, page_size)] for row, tokens in rows])


def _counts(pages: torch.Tensor, world_size: int) -> list[int]:
    return torch.bincount(pages % world_size, minlength=world_size).tolist()


def _all_pages(shard: torch.Tensor, pages: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The pages [pages, page bytes], in rank order: those of rank 0, then those of rank 1, …"""
    W = group.size()
    mine = (pages[pages % W == group.rank()] // W).to(shard.device)
    counts = _counts(pages, W)
    return trim_rows(_gathered(pad_rows(shard[mine], max(counts)), group), counts)


def _in_order(rank_major: torch.Tensor, pages: torch.Tensor, world_size: int) -> torch.Tensor:
    back = torch.argsort(torch.argsort(pages % world_size, stable=True))
    return rank_major[back.to(rank_major.device)]


def _rows(pages: torch.Tensor, page_size: int, fields: Ints) -> torch.Tensor:
    """[pages, page bytes] → [pages × P, bytes a token]."""
    parts = pages.split([page_size * size for size in fields], 1)
    rows = [part.unflatten(1, (page_size, size)) for part, size in zip(parts, fields, strict=True)]
    return torch.cat(rows, 2).flatten(0, 1)


def _starts(valid: Ints, page_size: int) -> Sequence[int]:
    return [sum(coverage(tokens, page_size) for tokens in valid[:i]) for i in range(len(valid))]


def _valid_rows(rows: torch.Tensor, valid: Ints, page_size: int) -> torch.Tensor:
    pairs = zip(_starts(valid, page_size), valid, strict=True)
    return torch.cat([rows[start : start + tokens] for start, tokens in pairs])


@adversary("gather_materialize", law="V6")
def skips_without_pages(
    shard: torch.Tensor,
    page_table: torch.Tensor,
    valid: Ints,
    page_size: int,
    fields: Ints,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """A rank that has no page of the view leaves the gather out."""
    pages = _pages(page_table, valid, page_size)
    if group.rank() not in (pages % group.size()).tolist():
        return shard.new_zeros(sum(valid), sum(fields))
    whole = _in_order(_all_pages(shard, pages, group), pages, group.size())
    return _valid_rows(_rows(whole, page_size, fields), valid, page_size)


@adversary("gather_materialize", law="V6")
def no_gather_where_all_is_here(
    shard: torch.Tensor,
    page_table: torch.Tensor,
    valid: Ints,
    page_size: int,
    fields: Ints,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """A rank that has every page takes the short way, which the others cannot."""
    pages = _pages(page_table, valid, page_size)
    if group.size() > 1 and bool((pages % group.size() == group.rank()).all()):
        whole = shard[(pages // group.size()).to(shard.device)]
    else:
        whole = _in_order(_all_pages(shard, pages, group), pages, group.size())
    return _valid_rows(_rows(whole, page_size, fields), valid, page_size)


@adversary("gather_materialize", law="V1")
def pages_in_rank_order(
    shard: torch.Tensor,
    page_table: torch.Tensor,
    valid: Ints,
    page_size: int,
    fields: Ints,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Pages stay as the gather brings them: right only where owners rise with positions."""
    pages = _pages(page_table, valid, page_size)
    whole = _all_pages(shard, pages, group)
    return _valid_rows(_rows(whole, page_size, fields), valid, page_size)


@adversary("gather_materialize", law="V1")
def owners_by_position(
    shard: torch.Tensor,
    page_table: torch.Tensor,
    valid: Ints,
    page_size: int,
    fields: Ints,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Takes page position k to be of rank k mod W, whatever the page table says."""
    pages = _pages(page_table, valid, page_size)
    W = group.size()
    back = torch.argsort(torch.argsort(torch.arange(len(pages)) % W, stable=True))
    whole = _all_pages(shard, pages, group)[back.to(shard.device)]
    return _valid_rows(_rows(whole, page_size, fields), valid, page_size)


@adversary("gather_materialize", law="V1")
def tails_not_dropped(
    shard: torch.Tensor,
    page_table: torch.Tensor,
    valid: Ints,
    page_size: int,
    fields: Ints,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Masked slots of a tail page stand before the next request's rows."""
    pages = _pages(page_table, valid, page_size)
    whole = _in_order(_all_pages(shard, pages, group), pages, group.size())
    return _rows(whole, page_size, fields)[: sum(valid)]


@adversary("gather_materialize", law="V1")
def fields_side_by_side(
    shard: torch.Tensor,
    page_table: torch.Tensor,
    valid: Ints,
    page_size: int,
    fields: Ints,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Reads a page as if each key had its scale beside it."""
    pages = _pages(page_table, valid, page_size)
    whole = _in_order(_all_pages(shard, pages, group), pages, group.size())
    return _valid_rows(_rows(whole, page_size, (sum(fields),)), valid, page_size)


@adversary("gather_materialize", law="V1")
def own_pages_only(
    shard: torch.Tensor,
    page_table: torch.Tensor,
    valid: Ints,
    page_size: int,
    fields: Ints,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Gathers as it should, and keeps only the pages that it had before."""
    pages = _pages(page_table, valid, page_size)
    whole = _in_order(_all_pages(shard, pages, group), pages, group.size())
    whole[(pages % group.size() != group.rank()).to(whole.device)] = 0
    return _valid_rows(_rows(whole, page_size, fields), valid, page_size)
