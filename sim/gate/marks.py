"""Reachability marks: places that hurt. A run that never went there has proven little."""

from __future__ import annotations

from collections.abc import Iterator

from refmodel.layout.geometry import tail
from refmodel.layout.plan import Plan
from refmodel.storage.write import WritePath, WriteVerdict

MARKS = (
    "empty rank",
    "empty segment",
    "partial tail",
    "mid-page prefix",
    "batch",
    "padding rows",
    "direct write",
    "gathered write",
)


def marks_of(plan: Plan, verdict: WriteVerdict | None = None) -> Iterator[str]:
    """The marks that a forward reaches."""
    P, ranks = plan.grid.page_size, range(plan.grid.world_size)
    segments = [s for rank in ranks for half in plan.halves(rank) for s in half.segments]
    reached = (
        0 in plan.row_counts,
        any(not segment.tokens for segment in segments),
        any(tail(extent.end, P) for extent in plan.extents),
        any(tail(extent.prefix, P) for extent in plan.extents),
        len(plan.extents) > 1,
        plan.padding > 0,
        verdict is not None and verdict.path is WritePath.DIRECT,
        verdict is not None and verdict.path is WritePath.GATHERED,
    )
    return (mark for mark, there in zip(MARKS, reached, strict=True) if there)
