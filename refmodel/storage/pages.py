"""Rows in pages: which bytes of a page are whose (law F2).

A page holds field 0 of all its tokens, then field 1, …. Most formats are one field, so their rows lie one
behind the other; ``index_fp8`` has all keys of a page before all its scales.

>>> from refmodel.storage.formats import index_format
>>> byte_offsets(torch.tensor([197]), index_format("fp8", 128), page_size=64).tolist()
[[25984, 33556]]
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from math import gcd

import torch

from refmodel.storage.codecs import as_type
from refmodel.storage.formats import Format

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def byte_offsets(slots: torch.Tensor, row_format: Format, page_size: int) -> torch.Tensor:
    """Slots [n], int32 or int64 → int64 [n, fields]: where each field of a slot begins in the cache.

    In 64 bits: with 64 tokens a page, page 254,201 of ``index_fp8`` is beyond 2³¹ (F2).
    """
    wide = slots.to(torch.int64)
    page, offset = wide // page_size, wide % page_size
    in_page = [start + offset * size for start, size in _placed(row_format, page_size)]
    return page[:, None] * row_format.page_bytes(page_size) + torch.stack(in_page, 1)


def words(rows: torch.Tensor) -> torch.Tensor:
    """uint8 [n, bytes] as [n, words] of the widest integers that fit: fewer elements to move."""
    return rows.view(_WORDS[_word_size(rows)])


def _word_size(rows: torch.Tensor) -> int:
    """Bytes of the widest integers that rows can be seen as."""
    return gcd(rows.shape[-1], 8, *rows.stride()[:-1], rows.storage_offset())


def write_rows(pages: torch.Tensor, slots: torch.Tensor, packed: torch.Tensor, row_format: Format) -> None:
    """Write packed rows [n, bytes a token] at slots [n] of pages, uint8 [pages, page bytes]."""
    if len(row_format.fields) == 1:
        target = words(pages.view(-1, row_format.bytes_per_token))
        target[slots] = as_type(packed, target.dtype)
        return
    page_size = pages.shape[1] // row_format.bytes_per_token
    page, offset = slots // page_size, slots % page_size
    for part, field in zip(packed.split(row_format.fields, 1), _fields(pages, row_format), strict=True):
        target = words(field)
        target[page, offset] = as_type(part, target.dtype)


def read_rows(pages: torch.Tensor, slots: torch.Tensor, row_format: Format) -> torch.Tensor:
    """The packed rows [n, bytes a token] at slots [n] of pages, uint8 [pages, page bytes]."""
    if len(row_format.fields) == 1:
        return words(pages.view(-1, row_format.bytes_per_token))[slots].view(torch.uint8)
    page_size = pages.shape[1] // row_format.bytes_per_token
    page, offset = slots // page_size, slots % page_size
    parts = [words(field)[page, offset].view(torch.uint8) for field in _fields(pages, row_format)]
    return torch.cat(parts, 1)


def rows_of_pages(pages: torch.Tensor, row_format: Format, order: torch.Tensor | None = None) -> torch.Tensor:
    """The packed rows of pages, uint8 [pages, page bytes] → [n × P, bytes a token].

    ``order`` [n]: which pages, and in which order; all of them as they are if left out.
    """
    if len(row_format.fields) == 1:
        taken = pages if order is None else words(pages)[order].view(torch.uint8)
        return taken.view(-1, row_format.bytes_per_token)
    if order is None:
        order = torch.arange(len(pages), device=pages.device)
    page_size = pages.shape[1] // row_format.bytes_per_token
    rows = pages.new_empty(len(order), page_size, row_format.bytes_per_token)
    for part, field in zip(rows.split(row_format.fields, 2), _fields(pages, row_format), strict=True):
        # Straight to where it belongs: a copy in between would be as much again.
        wide = _WORDS[min(_word_size(part), _word_size(field))]
        torch.index_select(field.view(wide), 0, order, out=part.view(wide))
    return rows.flatten(0, 1)


def _fields(pages: torch.Tensor, row_format: Format) -> Iterator[torch.Tensor]:
    """Each field of all slots, [pages, P, bytes]: a view of the pages."""
    page_size = pages.shape[1] // row_format.bytes_per_token
    for start, size in _placed(row_format, page_size):
        yield pages[:, start : start + page_size * size].unflatten(1, (page_size, size))


def _placed(row_format: Format, page_size: int) -> Iterator[tuple[int, int]]:
    """(first byte in a page, bytes a token) of each field."""
    starts = accumulate((page_size * size for size in row_format.fields), initial=0)
    return zip(starts, row_format.fields, strict=False)
