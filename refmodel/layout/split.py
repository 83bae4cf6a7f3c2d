"""How one request's extent is cut into segments, and which rank gets which (laws S1, S2, S3, S8).

A zigzag split has 2W segments; rank r holds segment r (*prev*) and segment 2W−1−r (*next*), which balances
causal work. Segments are given by their 2W+1 bounds in absolute positions: segment i is [b[i], b[i+1]).

>>> token_balanced_bounds(Extent(0, 19), Grid(4, 64))
(0, 3, 6, 9, 11, 13, 15, 17, 19)
>>> page_aligned_bounds(Extent(70, 300), Grid(2, 64))
(70, 192, 256, 320, 370)
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import accumulate

from refmodel.layout.geometry import Extent, Grid


class Split(Enum):
    """The ways to split a batch over ranks."""

    TOKEN_BALANCED = "token_balanced"  # zigzag, segments differ by at most one token
    PAGE_ALIGNED = "page_aligned"  # zigzag on absolute page positions: one compute rank a page
    ROUND_ROBIN = "round_robin"  # token t of the concatenated batch on rank t mod W


def balanced(total: int, parts: int) -> list[int]:
    """``total`` things over ``parts`` places: the first ``total mod parts`` places get one more."""
    base, more = divmod(total, parts)
    return [base + (i < more) for i in range(parts)]


def token_balanced_bounds(extent: Extent, grid: Grid) -> tuple[int, ...]:
    """2W+1 absolute positions that cut the extent into segments of equal tokens, give or take one."""
    sizes = balanced(extent.tokens, 2 * grid.world_size)
    return tuple(accumulate(sizes, initial=extent.prefix))


def page_aligned_bounds(extent: Extent, grid: Grid) -> tuple[int, ...]:
    """2W+1 absolute positions; those inside the extent are multiples of P (S2). Empty segments are normal.

    A short extent keeps its actual pages: nothing is padded to W or 2W of them (S3).
    """
    units = extent.page_positions(grid.page_size)
    sizes = balanced(len(units), 2 * grid.world_size)
    unit_bounds = accumulate(sizes, initial=units.start)
    return tuple(min(max(unit * grid.page_size, extent.prefix), extent.end) for unit in unit_bounds)


def segment_rank(segment: int, world_size: int, rotation: int = 0) -> int:
    """Rank that computes a segment: the zigzag fold, rotated by the request's rotation."""
    fold = segment if segment < world_size else 2 * world_size - 1 - segment
    return (fold + rotation) % world_size


def rank_segments(rank: int, world_size: int, rotation: int = 0) -> tuple[int, int]:
    """The (prev, next) segments of a rank: the inverse of :func:`segment_rank`.

    >>> rank_segments(1, 4), rank_segments(1, 4, rotation=3)
    ((1, 6), (2, 5))
    """
    fold = (rank - rotation) % world_size
    return fold, 2 * world_size - 1 - fold


def choose_split(grid: Grid, extents: Sequence[Extent], *, shared_kv: bool) -> Split | None:
    """Whether CP runs and which split: from shared metadata alone, so all ranks decide alike (S8).

    With shared KV every page needs one compute rank, however short the extent (S3). Without it each rank
    keeps all pages, and a batch with fewer tokens than segments is cheaper on one rank: None, no CP.
    """
    if grid.world_size == 1:
        return None
    if shared_kv:
        return Split.PAGE_ALIGNED
    enough = all(extent.tokens >= 2 * grid.world_size for extent in extents)
    return Split.TOKEN_BALANCED if enough else None
