"""Wrong kernels of the operations on rows in :mod:`refmodel.ops.layout`."""

from __future__ import annotations

import torch

from properties.kernels.adversaries.adversary import adversary
from refmodel.layout.geometry import Extent, Grid, ceil_div
from refmodel.layout.plan import Plan, plan_batch
from refmodel.layout.rows import pad_rows
from refmodel.layout.split import Split
from refmodel.model.layer import lookup
from refmodel.ops.layout import ZIGZAG_SPLIT

Tensor = torch.Tensor
Ints = tuple[int, ...]


def _plan(
    prefixes: Ints, tokens: Ints, world_size: int, page_size: int, split: Split = Split.PAGE_ALIGNED
) -> Plan:
    extents = [Extent(prefix, count) for prefix, count in zip(prefixes, tokens, strict=True)]
    return plan_batch(extents, Grid(world_size, page_size), split)


def _fit(rows: Tensor, count: int) -> Tensor:
    """As many rows as there is room for; where there are too few, the rest of the room is zeros."""
    return torch.cat([rows[:count], rows.new_zeros(max(0, count - len(rows)), *rows.shape[1:])])


# -- zigzag_split ------------------------------------------------------------------------------------------


@adversary("zigzag_split", law="S2")
def cut_by_tokens(
    rows: Tensor, prefixes: Ints, tokens: Ints, rank: int, world_size: int, page_size: int
) -> Tensor:
    """Segments have equal numbers of tokens: right where those are whole pages."""
    plan = _plan(prefixes, tokens, world_size, page_size, Split.TOKEN_BALANCED)
    (space,) = ZIGZAG_SPLIT.spaces(rows, prefixes, tokens, rank, world_size, page_size)
    return _fit(plan.take(rows, rank), space.shape[0])


@adversary("zigzag_split", law="S2")
def pages_counted_from_the_prefix(
    rows: Tensor, prefixes: Ints, tokens: Ints, rank: int, world_size: int, page_size: int
) -> Tensor:
    """Pages begin where the new tokens do: right behind a prefix of whole pages."""
    plan = _plan((0,) * len(prefixes), tokens, world_size, page_size)
    (space,) = ZIGZAG_SPLIT.spaces(rows, prefixes, tokens, rank, world_size, page_size)
    return _fit(plan.take(rows, rank), space.shape[0])


@adversary("zigzag_split", law="S2")
def one_long_request(
    rows: Tensor, prefixes: Ints, tokens: Ints, rank: int, world_size: int, page_size: int
) -> Tensor:
    """The batch is split as if it were one request: right for one."""
    plan = _plan(prefixes[:1], (sum(tokens),), world_size, page_size)
    (space,) = ZIGZAG_SPLIT.spaces(rows, prefixes, tokens, rank, world_size, page_size)
    return _fit(plan.take(rows, rank), space.shape[0])


@adversary("zigzag_split", law="S2")
def request_by_request(
    rows: Tensor, prefixes: Ints, tokens: Ints, rank: int, world_size: int, page_size: int
) -> Tensor:
    """Prev and next of the first request, then of the second: right for one."""
    batch = zip(rows.split(tokens), prefixes, tokens, strict=True)
    alone = [_plan((prefix,), (n,), world_size, page_size).take(mine, rank) for mine, prefix, n in batch]
    return torch.cat(alone)


@adversary("zigzag_split", law="S2")
def split_halves_alike(
    rows: Tensor, prefixes: Ints, tokens: Ints, rank: int, world_size: int, page_size: int
) -> Tensor:
    """Half of the rank's rows are taken from where prev begins, half up to where next ends (S5)."""
    mine = _plan(prefixes, tokens, world_size, page_size).rows(rank)
    return rows[_cut_in_half(mine)]


def _cut_in_half(rows: Tensor) -> Tensor:
    """Batch rows of a rank, if both halves were as long."""
    if not len(rows):
        return rows
    half, rest = len(rows) // 2, len(rows) - len(rows) // 2
    return torch.cat([rows[0] + torch.arange(half), rows[-1] + 1 - torch.arange(rest, 0, -1)])


# -- rerange -----------------------------------------------------------------------------------------------


def _taken(buffers: Tensor, places: Tensor) -> Tensor:
    return buffers[places.clamp(max=len(buffers) - 1)]


@adversary("rerange", law="S4")
def buffers_of_the_average(
    buffers: Tensor, prefixes: Ints, tokens: Ints, world_size: int, page_size: int
) -> Tensor:
    """A rank's buffer is taken to hold ceil(n / W) rows: right where all hold as many."""
    plan = _plan(prefixes, tokens, world_size, page_size)
    length = ceil_div(plan.num_rows, world_size)
    places = [torch.arange(count) + rank * length for rank, count in enumerate(plan.row_counts)]
    rows = _taken(buffers, torch.cat(places))
    return torch.empty_like(rows).index_copy_(0, plan.gather_order.to(rows.device), rows)


@adversary("rerange", law="S4")
def padding_kept(buffers: Tensor, prefixes: Ints, tokens: Ints, world_size: int, page_size: int) -> Tensor:
    """Padding is taken for rows of the rank: it leaks wherever a rank is shorter than the longest."""
    order = _plan(prefixes, tokens, world_size, page_size).gather_order
    rows = buffers[: len(order)].contiguous()
    return torch.empty_like(rows).index_copy_(0, order.to(rows.device), rows)


@adversary("rerange", law="S4")
def tokens_split_evenly(
    buffers: Tensor, prefixes: Ints, tokens: Ints, world_size: int, page_size: int
) -> Tensor:
    """Undoes a split into equal numbers of tokens: right where those are whole pages."""
    return _taken(buffers, _plan(prefixes, tokens, world_size, page_size, Split.TOKEN_BALANCED).places)


@adversary("rerange", law="S4")
def halves_alike(buffers: Tensor, prefixes: Ints, tokens: Ints, world_size: int, page_size: int) -> Tensor:
    """Each rank's rows are cut in the middle: right where prev and next are as long (S5)."""
    plan = _plan(prefixes, tokens, world_size, page_size)
    rows = buffers.new_zeros(plan.num_rows, *buffers.shape[1:])
    for rank, count in enumerate(plan.row_counts):
        at = _cut_in_half(plan.rows(rank)).clamp(0, plan.num_rows - 1).to(rows.device)
        rows[at] = buffers[rank * plan.max_rank_rows :][:count]
    return rows


@adversary("rerange", law="S4")
def prefix_forgotten(
    buffers: Tensor, prefixes: Ints, tokens: Ints, world_size: int, page_size: int
) -> Tensor:
    """Pages are counted from the first new token: right behind a prefix of whole pages."""
    return _taken(buffers, _plan((0,) * len(prefixes), tokens, world_size, page_size).places)


# -- local_embedding ---------------------------------------------------------------------------------------


@adversary("local_embedding", law="D1")
def padding_in_front(ids: Tensor, table: Tensor, max_rank_rows: int) -> Tensor:
    """Rows are trimmed at the wrong end: padding leaks where a rank is shorter than the longest."""
    return lookup(table, pad_rows(ids, max_rank_rows))[max_rank_rows - len(ids) :]


@adversary("local_embedding", law="D1")
def id_zero_is_padding(ids: Tensor, table: Tensor, max_rank_rows: int) -> Tensor:
    """Padding is id 0, and its rows are cleared: so are those of the token that has this id."""
    return torch.where((ids == 0)[:, None], 0, table[ids])


@adversary("local_embedding", law="D1")
def embedded_in_bf16(ids: Tensor, table: Tensor, max_rank_rows: int) -> Tensor:
    """Rows pass through bf16: right for tables of bf16."""
    return table[ids].to(torch.bfloat16).to(table.dtype)
