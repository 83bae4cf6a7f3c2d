"""Wrong kernels that compute byte offsets in too few bits (law F2).

In 32 bits it takes a cache of more than 2³¹ bytes to show. The same fault in 12 bits shows on any machine; a
judge cannot know why bytes are missing there, and names the law of the bytes.
"""

from __future__ import annotations

import torch

from properties.kernels.adversaries.adversary import adversary
from refmodel.layout.geometry import num_pages
from refmodel.storage.view import drop_tails

Tensor = torch.Tensor
Ints = tuple[int, ...]

BITS_12, BITS_32 = 1 << 12, 1 << 31  # offsets wrap here


def _places(starts: Tensor, size: int, wrap: int, total: int) -> Tensor:
    """[n, size] bytes from each start on, if starts wrap."""
    at = (starts.long() % wrap)[:, None] + torch.arange(size, device=starts.device)
    return at.clamp(max=total - 1)


def _get(stored: Tensor, starts: Tensor, size: int, wrap: int) -> Tensor:
    flat = _flat(stored)
    return flat[_places(starts, size, wrap, len(flat))]


def _put(stored: Tensor, starts: Tensor, rows: Tensor, wrap: int) -> None:
    flat = _flat(stored)
    flat[_places(starts, rows.shape[1], wrap, len(flat))] = rows
    stored.copy_(flat.view(stored.dtype).view(stored.shape))


def _flat(stored: Tensor) -> Tensor:
    return stored.contiguous().view(-1).view(torch.uint8)


def _bytes(rows: Tensor) -> Tensor:
    flat = rows.contiguous().view(-1).view(torch.uint8)
    return flat.view(len(rows), -1) if len(rows) else flat.view(0, rows[:1].nbytes)


def _index_starts(slots: Tensor, dim: int, page_size: int) -> tuple[Tensor, Tensor]:
    """First byte of each key, of each scale."""
    page, offset = slots.long() // page_size, slots.long() % page_size
    first = page * page_size * (dim + 4)
    return first + offset * dim, first + page_size * dim + 4 * offset


# -- materialize -------------------------------------------------------------------------------------------


def _view(shards: Tensor, page_table: Tensor, valid: Ints, page_size: int, fields: Ints, wrap: int) -> Tensor:
    world_size, local_pages, page_bytes = shards.shape
    used = [row[: num_pages(tokens, page_size)] for row, tokens in zip(page_table, valid, strict=True)]
    pages = torch.cat(used).long()
    first = (pages % world_size * local_pages + pages // world_size) * page_bytes
    offset = torch.arange(page_size, device=first.device)
    parts, in_page = [], 0
    for size in fields:
        starts = (first[:, None] + in_page + offset * size).flatten()
        parts.append(_get(shards, starts, size, wrap))
        in_page += page_size * size
    return drop_tails(torch.cat(parts, 1), valid, page_size)


@adversary("materialize", law="V1")
def view_offsets_in_12_bits(
    shards: Tensor, page_table: Tensor, valid: Ints, page_size: int, fields: Ints
) -> Tensor:
    """Byte offsets wrap at 2¹²: right in shards of fewer bytes."""
    return _view(shards, page_table, valid, page_size, fields, BITS_12)


@adversary("materialize", law="V1", huge=True)
def view_offsets_in_32_bits(
    shards: Tensor, page_table: Tensor, valid: Ints, page_size: int, fields: Ints
) -> Tensor:
    """Byte offsets wrap at 2³¹: right in shards of fewer bytes."""
    return _view(shards, page_table, valid, page_size, fields, BITS_32)


# -- mla_write, mla_read -----------------------------------------------------------------------------------


def _mla_write(cache: Tensor, slots: Tensor, rows: Tensor, wrap: int) -> None:
    mine = slots >= 0
    _put(cache, slots[mine].long() * cache[:1].nbytes, _bytes(rows[mine]), wrap)


@adversary("mla_write", law="F1")
def write_offsets_in_12_bits(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Byte offsets wrap at 2¹²: right in a cache of fewer bytes."""
    _mla_write(cache, slots, rows, BITS_12)


@adversary("mla_write", law="F2", huge=True)
def write_offsets_in_32_bits(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Byte offsets wrap at 2³¹: right in a cache of fewer bytes."""
    _mla_write(cache, slots, rows, BITS_32)


def _mla_read(cache: Tensor, slots: Tensor, wrap: int) -> Tensor:
    width = cache[:1].nbytes
    return _get(cache, slots.long() * width, width, wrap).view(cache.dtype)


@adversary("mla_read", law="F1")
def read_offsets_in_12_bits(cache: Tensor, slots: Tensor) -> Tensor:
    """Byte offsets wrap at 2¹²: right in a cache of fewer bytes."""
    return _mla_read(cache, slots, BITS_12)


@adversary("mla_read", law="F2", huge=True)
def read_offsets_in_32_bits(cache: Tensor, slots: Tensor) -> Tensor:
    """Byte offsets wrap at 2³¹: right in a cache of fewer bytes."""
    return _mla_read(cache, slots, BITS_32)


# -- index_write, index_read -------------------------------------------------------------------------------


def _index_write(
    pages: Tensor, slots: Tensor, keys: Tensor, scales: Tensor, page_size: int, wrap: int
) -> None:
    mine = slots >= 0
    key_starts, scale_starts = _index_starts(slots[mine], keys.shape[1], page_size)
    _put(pages, key_starts, keys[mine], wrap)
    _put(pages, scale_starts, _bytes(scales[mine][:, None]), wrap)


@adversary("index_write", law="F1")
def index_write_offsets_in_12_bits(
    pages: Tensor, slots: Tensor, keys: Tensor, scales: Tensor, page_size: int
) -> None:
    """Byte offsets wrap at 2¹²: right in pages of fewer bytes."""
    _index_write(pages, slots, keys, scales, page_size, BITS_12)


@adversary("index_write", law="F2", huge=True)
def index_write_offsets_in_32_bits(
    pages: Tensor, slots: Tensor, keys: Tensor, scales: Tensor, page_size: int
) -> None:
    """Byte offsets wrap at 2³¹, as from page 254,201 on: right before it."""
    _index_write(pages, slots, keys, scales, page_size, BITS_32)


def _index_read(pages: Tensor, slots: Tensor, page_size: int, wrap: int) -> tuple[Tensor, Tensor]:
    dim = pages.shape[1] // page_size - 4
    key_starts, scale_starts = _index_starts(slots, dim, page_size)
    scales = _get(pages, scale_starts, 4, wrap).view(torch.float32).flatten()
    return _get(pages, key_starts, dim, wrap), scales


@adversary("index_read", law="F1")
def index_read_offsets_in_12_bits(pages: Tensor, slots: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Byte offsets wrap at 2¹²: right in pages of fewer bytes."""
    return _index_read(pages, slots, page_size, BITS_12)


@adversary("index_read", law="F2", huge=True)
def index_read_offsets_in_32_bits(pages: Tensor, slots: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Byte offsets wrap at 2³¹, as from page 254,201 on: right before it."""
    return _index_read(pages, slots, page_size, BITS_32)
