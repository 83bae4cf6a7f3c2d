"""Wrong ways to cut one request."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch.distributed as dist

from properties.mutants.mutant import Right, mutant
from refmodel.layout import split
from refmodel.layout.geometry import Extent, Grid
from refmodel.layout.split import Split


@mutant(split.balanced, "split-02", "S1", source="reported in TransformerEngine#1930, Megatron-LM#1669")
def floor_per_rank(total: int, parts: int) -> list[int]:
    """Every part gets the floor: the last tokens are lost."""
    return [total // parts] * parts


@mutant(split.token_balanced_bounds, "split-05", "S1", "S3", source="reported in SkyRL#1407, mbridge#158")
def bounds_from_the_padded_length(extent: Extent, grid: Grid) -> tuple[int, ...]:
    """Bounds come from the length padded to 2W pieces, and read past the real tokens."""
    parts = 2 * grid.world_size
    padded = -(-extent.tokens // parts) * parts
    return tuple(accumulate([padded // parts] * parts, initial=extent.prefix))


@mutant(split.balanced, "split-06", "S1", "S3", source="reported in flash-linear-attention#1092")
def divide_by_the_share(total: int, parts: int) -> list[int]:
    """Parts are counted by the floor share: division by zero when there are fewer things than parts."""
    share = total // parts
    used = min(parts, total // share)
    return [share] * used + [0] * (parts - used)


@mutant(split.page_aligned_bounds, "relative-pages", "S2")
def pages_counted_from_the_prefix(extent: Extent, grid: Grid) -> tuple[int, ...]:
    """Page units start at the prefix instead of at absolute page positions."""
    P = grid.page_size
    sizes = split.balanced(-(-extent.tokens // P), 2 * grid.world_size)
    return tuple(min(extent.prefix + unit * P, extent.end) for unit in accumulate(sizes, initial=0))


@mutant(split.page_aligned_bounds, "tail-page-to-the-last-segment", "S2", "S3")
def remainder_last(extent: Extent, grid: Grid) -> tuple[int, ...]:
    """The floor share everywhere and the rest to the last segment: one rank computes nearly all of a tail."""
    P, parts = grid.page_size, 2 * grid.world_size
    units = extent.page_positions(P)
    sizes = [len(units) // parts] * (parts - 1)
    bounds = [*accumulate(sizes, initial=units.start), units.stop]
    return tuple(min(max(unit * P, extent.prefix), extent.end) for unit in bounds)


@mutant(split.choose_split, "short-suffix-fallback", "S3", source="rejected in the fork's history")
def token_balanced_when_short(
    right: Right, grid: Grid, extents: Sequence[Extent], *, shared_kv: bool
) -> Split | None:
    """An extent of fewer page units than segments falls back to the token-balanced split."""
    short = any(len(e.page_positions(grid.page_size)) < 2 * grid.world_size for e in extents)
    if shared_kv and short and grid.world_size > 1:
        return Split.TOKEN_BALANCED
    return right(grid, extents, shared_kv=shared_kv)


@mutant(split.choose_split, "split-by-rank", "S8")
def odd_ranks_decide_otherwise(
    right: Right, grid: Grid, extents: Sequence[Extent], *, shared_kv: bool
) -> Split | None:
    """Odd ranks look at their own state and turn CP off."""
    if dist.is_initialized() and dist.get_rank() % 2:
        return None
    return right(grid, extents, shared_kv=shared_kv)


@mutant(split.rank_segments, "contiguous-pairs", "S1", "O4")
def neighbouring_segments(rank: int, world_size: int, rotation: int = 0) -> tuple[int, int]:
    """Rank r takes segments 2r and 2r + 1: contiguous, not zigzag, and not what the page lanes assume."""
    fold = (rank - rotation) % world_size
    return 2 * fold, 2 * fold + 1
