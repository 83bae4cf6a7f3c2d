"""From the pages of a request to the slots of its new tokens (law L2).

Pages and slots are two counts: tokens go into the open tail page as long as it has room, and only then into
pages newly taken. The field's worked example, W = 1, P = 4: a request with six tokens in pages 2 and 3, its
last in slot 13, gets eleven more.

>>> grid, extent = Grid(world_size=1, page_size=4), Extent(prefix=6, tokens=11)
>>> new_pages(6, 11, page_size=4)
3
>>> extend_slots([2, 3], [5, 6, 7], extent, grid).tolist()
[14, 15, 20, 21, 22, 23, 24, 25, 26, 27, 28]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from refmodel.errors import InvalidInput, Where
from refmodel.layout.geometry import Extent, Grid, num_pages
from refmodel.layout.ownership import PageTable


def new_pages(prefix: int, tokens: int, page_size: int) -> int:
    """Pages to take for ``tokens`` new tokens behind ``prefix`` in cache: none for the open tail page."""
    return num_pages(prefix + tokens, page_size) - num_pages(prefix, page_size)


def extend_slots(
    pages: Sequence[int], fresh: Sequence[int], extent: Extent, grid: Grid, *, request: str = ""
) -> torch.Tensor:
    """Logical slots of an extent's new tokens, int64 [extent.tokens] on the CPU, in order of position.

    ``pages``: the request's table so far, as many as its prefix occupies. ``fresh``: the pages taken for the
    extent, ``new_pages`` of them, by page position. Whoever shares the open tail page copies it first (L5).
    :class:`InvalidInput` for other counts, and for dummy or repeated pages.
    """
    P, first = grid.page_size, extent.prefix % grid.page_size
    _require(pages, num_pages(extent.prefix, P), "pages of the prefix", request)
    _require(fresh, new_pages(extent.prefix, extent.tokens, P), "pages taken for an extent", request)
    table = PageTable(torch.tensor([*pages, *fresh], dtype=torch.int64), grid, request).pages
    starts = table[extent.prefix // P :] * P  # of the pages the extent touches; the open tail is the first
    opened = min(-extent.prefix % P, extent.tokens)
    whole, rest = divmod(extent.tokens - opened, P)
    starts_open, starts_whole, starts_tail = starts.unsqueeze(1).split(
        [len(starts) - len(fresh), whole, len(fresh) - whole]
    )
    parts = (
        starts_open + torch.arange(first, first + opened),
        starts_whole + torch.arange(P),
        starts_tail + torch.arange(rest),
    )
    return torch.cat([part.flatten() for part in parts])


def _require(pages: Sequence[int], count: int, what: str, request: str) -> None:
    if len(pages) != count:
        raise InvalidInput(what, expected=count, received=len(pages), where=Where(request=request or None))
