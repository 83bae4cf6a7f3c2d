"""Wrong kernels of the operations in :mod:`refmodel.ops.topk`."""

from __future__ import annotations

from itertools import pairwise

import torch

from properties.kernels.adversaries.adversary import adversary
from refmodel.ops.op import Results
from refmodel.ops.topk import TOPK_MERGE, TOPK_TRANSFORM_PAGED, TOPK_TRANSFORM_RAGGED

Tensor = torch.Tensor
Ints = tuple[int, ...]

# -- PAGED -------------------------------------------------------------------------------------------------


@adversary("topk_transform_paged", law="A2")
def prefix_counted_twice(
    logits: Tensor, ks: Tensor, ke: Tensor, k: int, page_table: Tensor, cu_seqlens_q: Ints, page_size: int
) -> Results:
    """ke holds the prefix already, and it is added once more."""
    longer = ke.clone()
    for start, stop in pairwise(cu_seqlens_q):
        if start < stop:
            longer[start:stop] += ke[start] - ks[start] - 1
    longer = torch.minimum(longer.clamp(max=logits.shape[1]), _held(page_table, ks, cu_seqlens_q, page_size))
    return TOPK_TRANSFORM_PAGED.reference(logits, ks, longer, k, page_table, cu_seqlens_q, page_size)


def _held(page_table: Tensor, ks: Tensor, cu_seqlens_q: Ints, page_size: int) -> Tensor:
    """[m] one past the last key for which a row's request has a page: a fault need not crash."""
    last = ks.clone()
    for request, (start, stop) in enumerate(pairwise(cu_seqlens_q)):
        last[start:stop] += int((page_table[request] >= 0).sum()) * page_size
    return last


@adversary("topk_transform_paged", law="A2")
def one_key_too_many(
    logits: Tensor, ks: Tensor, ke: Tensor, k: int, page_table: Tensor, cu_seqlens_q: Ints, page_size: int
) -> Results:
    """ke is taken for the last key, not for the one behind it."""
    held = _held(page_table, ks, cu_seqlens_q, page_size)
    more = torch.minimum((ke + (ke > ks).to(ke.dtype)).clamp(max=logits.shape[1]), held)
    return TOPK_TRANSFORM_PAGED.reference(logits, ks, more, k, page_table, cu_seqlens_q, page_size)


@adversary("topk_transform_paged", law="A2")
def one_key_too_few(
    logits: Tensor, ks: Tensor, ke: Tensor, k: int, page_table: Tensor, cu_seqlens_q: Ints, page_size: int
) -> Results:
    """The last key of a row is not seen."""
    fewer = torch.maximum(ks, ke - 1)
    return TOPK_TRANSFORM_PAGED.reference(logits, ks, fewer, k, page_table, cu_seqlens_q, page_size)


@adversary("topk_transform_paged", law="A3")
def page_table_of_request_0(
    logits: Tensor, ks: Tensor, ke: Tensor, k: int, page_table: Tensor, cu_seqlens_q: Ints, page_size: int
) -> Results:
    """All rows look their pages up in the first table: right for one request."""
    (positions,) = TOPK_TRANSFORM_RAGGED.reference(logits, ks, ke, k, torch.zeros_like(ks))
    pages = page_table[0][positions.clamp(min=0).long() // page_size]
    return (torch.where(positions < 0, positions, pages * page_size + positions % page_size),)


@adversary("topk_transform_paged", law="A3")
def positions_for_slots(
    logits: Tensor, ks: Tensor, ke: Tensor, k: int, page_table: Tensor, cu_seqlens_q: Ints, page_size: int
) -> Results:
    """The transform is left out."""
    zero = torch.zeros_like(ks)
    return (TOPK_TRANSFORM_RAGGED.reference(logits, ks, ke, k, zero)[0].to(page_table.dtype),)


@adversary("topk_transform_paged", law="A3")
def padding_rows_belong_to_the_last(
    logits: Tensor, ks: Tensor, ke: Tensor, k: int, page_table: Tensor, cu_seqlens_q: Ints, page_size: int
) -> Results:
    """A row that sees no key gets the first slot of a request."""
    (slots,) = TOPK_TRANSFORM_PAGED.reference(logits, ks, ke, k, page_table, cu_seqlens_q, page_size)
    slots[ke == ks, 0] = page_table[-1, 0].clamp(min=1) * page_size
    return (slots,)


@adversary("topk_transform_paged", law="A2")
def neighbours_are_equal(
    logits: Tensor, ks: Tensor, ke: Tensor, k: int, page_table: Tensor, cu_seqlens_q: Ints, page_size: int
) -> Results:
    """Logits are compared by the upper half of their bits."""
    rounded = logits.bfloat16().float()
    return TOPK_TRANSFORM_PAGED.reference(rounded, ks, ke, k, page_table, cu_seqlens_q, page_size)


@adversary("topk_transform_paged", law="A2")
def few_ties_kept(
    logits: Tensor, ks: Tensor, ke: Tensor, k: int, page_table: Tensor, cu_seqlens_q: Ints, page_size: int
) -> Results:
    """Of equal logits at the threshold 1,024 are kept, the rest of the row stays −1."""
    (slots,) = TOPK_TRANSFORM_PAGED.reference(logits, ks, ke, k, page_table, cu_seqlens_q, page_size)
    visible = (torch.arange(logits.shape[1]) >= ks[:, None]) & (torch.arange(logits.shape[1]) < ke[:, None])
    for row, (seen, length) in enumerate(zip(visible, (ke - ks).tolist(), strict=True)):
        if length > k:
            best = logits[row][seen].topk(k).values
            lost = int((best == best[-1]).sum()) - 1024
            slots[row, k - max(0, lost) :] = -1
    return (slots,)


@adversary("topk_transform_paged", law="A2")
def largest_magnitudes(
    logits: Tensor, ks: Tensor, ke: Tensor, k: int, page_table: Tensor, cu_seqlens_q: Ints, page_size: int
) -> Results:
    """Bits of floats are compared as integers, so that negative ones are in the wrong order."""
    return TOPK_TRANSFORM_PAGED.reference(logits.abs(), ks, ke, k, page_table, cu_seqlens_q, page_size)


@adversary("topk_transform_paged", law="A2")
def slots_of_zero(
    logits: Tensor, ks: Tensor, ke: Tensor, k: int, page_table: Tensor, cu_seqlens_q: Ints, page_size: int
) -> Results:
    """Returns −1 everywhere: nothing is chosen."""
    return (torch.full((len(logits), k), -1, dtype=page_table.dtype),)


# -- RAGGED ------------------------------------------------------------------------------------------------


@adversary("topk_transform_ragged", law="A3")
def offset_forgotten(logits: Tensor, ks: Tensor, ke: Tensor, k: int, row_starts: Tensor) -> Results:
    """Positions stay as they are: right for one request."""
    return TOPK_TRANSFORM_RAGGED.reference(logits, ks, ke, k, torch.zeros_like(row_starts))


@adversary("topk_transform_ragged", law="A3")
def columns_for_rows(logits: Tensor, ks: Tensor, ke: Tensor, k: int, row_starts: Tensor) -> Results:
    """Columns of the logits are given: right where row_starts are ks."""
    return TOPK_TRANSFORM_RAGGED.reference(logits, ks, ke, k, ks.to(row_starts.dtype))


@adversary("topk_transform_ragged", law="A3")
def offset_of_none(logits: Tensor, ks: Tensor, ke: Tensor, k: int, row_starts: Tensor) -> Results:
    """row_starts are added to −1, too."""
    (rows,) = TOPK_TRANSFORM_RAGGED.reference(logits, ks, ke, k, row_starts)
    return (torch.where(rows < 0, row_starts[:, None] - 1, rows),)


@adversary("topk_transform_ragged", law="A2")
def short_rows_by_logit(logits: Tensor, ks: Tensor, ke: Tensor, k: int, row_starts: Tensor) -> Results:
    """A row with no more than k keys gets them by falling logit, as any other."""
    (rows,) = TOPK_TRANSFORM_RAGGED.reference(logits, ks, ke, k, row_starts)
    for row, (start, stop, first) in enumerate(
        zip(ks.tolist(), ke.tolist(), row_starts.tolist(), strict=True)
    ):
        if stop - start <= k:
            order = logits[row, start:stop].argsort(descending=True)
            rows[row, : stop - start] = (order + first).to(rows.dtype)
    return (rows,)


@adversary("topk_transform_ragged", law="A2")
def best_key_twice(logits: Tensor, ks: Tensor, ke: Tensor, k: int, row_starts: Tensor) -> Results:
    """The last key of a long row is a copy of its first one."""
    (rows,) = TOPK_TRANSFORM_RAGGED.reference(logits, ks, ke, k, row_starts)
    long = ke - ks > k
    rows[long, -1] = rows[long, 0]
    return (rows,)


@adversary("topk_transform_ragged", law="A2")
def none_in_front(logits: Tensor, ks: Tensor, ke: Tensor, k: int, row_starts: Tensor) -> Results:
    """−1 stands before the keys of a short row."""
    (rows,) = TOPK_TRANSFORM_RAGGED.reference(logits, ks, ke, k, row_starts)
    return (torch.stack([row.roll(int((row < 0).sum())) for row in rows]) if len(rows) else rows,)


@adversary("topk_transform_ragged", law="A2")
def next_best_instead(logits: Tensor, ks: Tensor, ke: Tensor, k: int, row_starts: Tensor) -> Results:
    """A long row gets its key k + 1 for its key k."""
    (rows,) = TOPK_TRANSFORM_RAGGED.reference(logits, ks, ke, k, row_starts)
    (more,) = TOPK_TRANSFORM_RAGGED.reference(logits, ks, ke, k + 1, row_starts)
    long = ke - ks > k
    rows[long, -1] = more[long, -1]
    return (rows,)


# -- merge -------------------------------------------------------------------------------------------------


@adversary("topk_merge", law="A2")
def first_part_alone(logits: Tensor, keys: Tensor, k: int) -> Results:
    """The best of the first rank, which each rank takes for that of all."""
    return TOPK_MERGE.reference(logits[:1], keys[:1], k)


@adversary("topk_merge", law="A2")
def parts_in_a_row(logits: Tensor, keys: Tensor, k: int) -> Results:
    """Candidates of the parts one behind the other, cut at k."""
    every = keys.movedim(0, 1).flatten(1)
    order = (every < 0).to(torch.int8).argsort(dim=1, stable=True)
    every = every.gather(1, order)[:, :k]
    none = every.new_full((len(every), k - every.shape[1]), -1)
    return (torch.cat([every, none], 1),)


@adversary("topk_merge", law="A6")
def none_is_a_key(logits: Tensor, keys: Tensor, k: int) -> Results:
    """−1 is a candidate like any other: as an unsigned number it is a key."""
    (merged,) = TOPK_MERGE.reference(logits.nan_to_num(nan=9.0), keys.where(keys >= 0, 2**30), k)
    return (merged,)


@adversary("topk_merge", law="A2")
def merged_by_logit(logits: Tensor, keys: Tensor, k: int) -> Results:
    """Short rows come by falling logit."""
    scores = logits.masked_fill(keys < 0, -torch.inf).movedim(0, 1).flatten(1)
    every = keys.movedim(0, 1).flatten(1).gather(1, scores.argsort(dim=1, descending=True))[:, :k]
    return (torch.cat([every, every.new_full((len(every), k - every.shape[1]), -1)], 1),)


@adversary("topk_merge", law="A2")
def lowest_kept(logits: Tensor, keys: Tensor, k: int) -> Results:
    """The k worst."""
    return TOPK_MERGE.reference(-logits, keys, k)
