"""Wrong kernels of the operations in :mod:`refmodel.ops.storage`. Those of offsets have their own room."""

from __future__ import annotations

import torch

from properties.kernels.adversaries.adversary import adversary
from refmodel.layout.geometry import num_pages
from refmodel.ops.storage import INDEX_READ, INDEX_WRITE, MLA_WRITE
from refmodel.storage.view import drop_tails

Tensor = torch.Tensor
Ints = tuple[int, ...]

# -- materialize -------------------------------------------------------------------------------------------


def _pages(page_table: Tensor, valid: Ints, page_size: int) -> list[Tensor]:
    """The pages of each request."""
    return [row[: num_pages(tokens, page_size)] for row, tokens in zip(page_table, valid, strict=True)]


def _rows(shards: Tensor, pages: Tensor, page_size: int, fields: Ints) -> Tensor:
    """Logical pages [n] → their rows, tails included, [n × P, sum(fields)]."""
    world_size, local_pages, _ = shards.shape
    stored = shards[pages % world_size, pages // world_size % local_pages]
    starts = [page_size * sum(fields[:i]) for i in range(len(fields) + 1)]
    parts = [stored[:, start : start + page_size * size] for start, size in zip(starts, fields, strict=False)]
    return torch.cat([part.unflatten(1, (page_size, -1)) for part in parts], 2).flatten(0, 1)


@adversary("materialize", law="V1")
def consecutive_pages(
    shards: Tensor, page_table: Tensor, valid: Ints, page_size: int, fields: Ints
) -> Tensor:
    """From each request's first page on, pages are read one behind the other: right where they follow."""
    pages = [
        mine[:1] + torch.arange(len(mine), device=mine.device)
        for mine in _pages(page_table, valid, page_size)
    ]
    return drop_tails(_rows(shards, torch.cat(pages), page_size, fields), valid, page_size)


@adversary("materialize", law="V1")
def tails_left_in(shards: Tensor, page_table: Tensor, valid: Ints, page_size: int, fields: Ints) -> Tensor:
    """Pages are copied whole: right for full pages, else the tail of one request moves the next."""
    pages = torch.cat(_pages(page_table, valid, page_size))
    return _rows(shards, pages, page_size, fields)[: sum(valid)].clone()


@adversary("materialize", law="V1")
def group_wide_pages_on_a_rank(
    shards: Tensor, page_table: Tensor, valid: Ints, page_size: int, fields: Ints
) -> Tensor:
    """A page's group-wide number is used on its owner's storage: right in a world of one."""
    pages, world_size = torch.cat(_pages(page_table, valid, page_size)), len(shards)
    return drop_tails(
        _rows(shards, pages * world_size + pages % world_size, page_size, fields), valid, page_size
    )


@adversary("materialize", law="V1")
def scales_beside_their_keys(
    shards: Tensor, page_table: Tensor, valid: Ints, page_size: int, fields: Ints
) -> Tensor:
    """A page is taken to hold one row behind the other: right for formats of one field."""
    pages = torch.cat(_pages(page_table, valid, page_size))
    return drop_tails(_rows(shards, pages, page_size, (sum(fields),)), valid, page_size)


@adversary("materialize", law="V1")
def table_read_through(
    shards: Tensor, page_table: Tensor, valid: Ints, page_size: int, fields: Ints
) -> Tensor:
    """The page table is read row after row without a stop at each request's end: −1 is taken for a page."""
    pages = page_table.flatten()[: sum(num_pages(tokens, page_size) for tokens in valid)]
    return drop_tails(_rows(shards, pages, page_size, fields), valid, page_size)


@adversary("materialize", law="V1")
def table_of_the_first_request(
    shards: Tensor, page_table: Tensor, valid: Ints, page_size: int, fields: Ints
) -> Tensor:
    """Every request is read through the first one's pages: right for one request."""
    wanted = [len(mine) for mine in _pages(page_table, valid, page_size)]
    pages = torch.cat([page_table[0, :count] for count in wanted])
    return drop_tails(_rows(shards, pages, page_size, fields), valid, page_size)


# -- mla_write, mla_read -----------------------------------------------------------------------------------


@adversary("mla_write", law="O3")
def minus_one_is_the_last_slot(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """−1 counts from the end: rows of other ranks go to the last slot."""
    cache[slots] = rows


@adversary("mla_write", law="O3")
def minus_one_is_slot_zero(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """−1 is clamped: rows of other ranks go to slot 0."""
    cache[slots.clamp(min=0)] = rows


@adversary("mla_write", law="O3")
def others_cleared(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """The cache is made anew: what was in other slots is lost."""
    cache.zero_()
    MLA_WRITE.reference(cache, slots, rows)


@adversary("mla_write", law="F1")
def written_in_one_run(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Rows are written one behind the other from the first slot on: right where slots follow each other."""
    mine = slots >= 0
    start = int(slots[mine][0]) if bool(mine.any()) else 0
    room = cache[start : start + int(mine.sum())]
    room.copy_(rows[mine][: len(room)])


@adversary("mla_write", law="F1")
def unowned_rows_not_skipped(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """The slots are compacted, the rows are not: right where no slot is −1."""
    mine = slots[slots >= 0]
    cache[mine] = rows[: len(mine)]


@adversary("mla_read", law="F1")
def read_in_one_run(cache: Tensor, slots: Tensor) -> Tensor:
    """Rows are read one behind the other from the first slot on: right where slots follow each other."""
    run = slots[:1] + torch.arange(len(slots), device=slots.device)
    return cache[run % len(cache)]


@adversary("mla_read", law="F1")
def read_in_order_of_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """Slots are sorted for the sake of memory, and their rows are not put back."""
    return cache[slots.sort().values]


# -- index_write, index_read -------------------------------------------------------------------------------


def _token_major(pages: Tensor, page_size: int) -> Tensor:
    """[slots, dim + 4] as if each key were followed by its scale."""
    return pages.contiguous().view(len(pages) * page_size, -1)


@adversary("index_write", law="F1")
def scale_behind_each_key(pages: Tensor, slots: Tensor, keys: Tensor, scales: Tensor, page_size: int) -> None:
    """A page is one row behind the other, as in other formats, not all keys and then all scales."""
    mine, stored = slots >= 0, _token_major(pages, page_size)
    stored[slots[mine]] = torch.cat([keys, scales.contiguous().view(torch.uint8).view(-1, 4)], 1)[mine]
    pages.copy_(stored.view(pages.shape))


@adversary("index_write", law="F1")
def keys_without_scales(pages: Tensor, slots: Tensor, keys: Tensor, scales: Tensor, page_size: int) -> None:
    """Keys are written, scales are not: those of earlier tokens stay."""
    mine = slots >= 0
    old = INDEX_READ.reference(pages, slots.clamp(min=0), page_size)[1]
    INDEX_WRITE.reference(pages, slots[mine], keys[mine], old[mine], page_size)


@adversary("index_write", law="F1")
def half_of_each_key(pages: Tensor, slots: Tensor, keys: Tensor, scales: Tensor, page_size: int) -> None:
    """Only the first half of a key is written, as by a kernel for keys of 64 elements."""
    old = INDEX_READ.reference(pages, slots.clamp(min=0), page_size)[0]
    half = keys.shape[1] // 2
    INDEX_WRITE.reference(pages, slots, torch.cat([keys[:, :half], old[:, half:]], 1), scales, page_size)


@adversary("index_write", law="F1")
def scales_where_pages_of_64_have_them(
    pages: Tensor, slots: Tensor, keys: Tensor, scales: Tensor, page_size: int
) -> None:
    """Keys and scales are placed as in pages of 64: right for those, and within a larger cache only."""
    dim = keys.shape[1]
    mine = slots >= 0
    flat = pages.contiguous().view(-1)
    page, offset = slots[mine].long() // 64, slots[mine].long() % 64
    first = page * 64 * (dim + 4)
    parts = ((first + offset * dim, keys[mine]), (first + 64 * dim + 4 * offset, _scale_bytes(scales[mine])))
    for start, part in parts:
        at = start[:, None] + torch.arange(part.shape[1], device=pages.device)
        flat[at % len(flat)] = part
    pages.copy_(flat.view(pages.shape))


def _scale_bytes(scales: Tensor) -> Tensor:
    return scales.contiguous().view(torch.uint8).view(-1, 4)


@adversary("index_write", law="O3")
def unowned_keys_at_the_end(
    pages: Tensor, slots: Tensor, keys: Tensor, scales: Tensor, page_size: int
) -> None:
    """−1 counts from the end: keys of other ranks go to the last slot."""
    last = len(pages) * page_size - 1
    unowned = (slots < 0).nonzero().flatten()[:1]
    INDEX_WRITE.reference(
        pages, torch.full_like(slots[unowned], last), keys[unowned], scales[unowned], page_size
    )
    INDEX_WRITE.reference(pages, slots, keys, scales, page_size)


@adversary("index_read", law="F1")
def scale_read_behind_each_key(pages: Tensor, slots: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """A page is one row behind the other, as in other formats, not all keys and then all scales."""
    rows = _token_major(pages, page_size)[slots]
    return rows[:, :-4].contiguous(), rows[:, -4:].contiguous().view(torch.float32).flatten()


@adversary("index_read", law="F1")
def one_scale_a_page(pages: Tensor, slots: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """The first scale of a page is taken for all its keys."""
    keys, _ = INDEX_READ.reference(pages, slots, page_size)
    return keys, INDEX_READ.reference(pages, slots // page_size * page_size, page_size)[1]


@adversary("index_read", law="F1")
def index_pages_of_64(pages: Tensor, slots: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Offsets are those of pages of 64, whatever the page size."""
    dim = pages.shape[1] // page_size - 4
    flat = pages.contiguous().view(-1)
    page, offset = slots.long() // 64, slots.long() % 64
    key, scale = page * 64 * (dim + 4) + offset * dim, page * 64 * (dim + 4) + 64 * dim + 4 * offset
    at = [
        start[:, None] + torch.arange(size, device=pages.device) for start, size in ((key, dim), (scale, 4))
    ]
    keys, scales = (flat[place % len(flat)] for place in at)
    return keys, scales.view(torch.float32).flatten()
