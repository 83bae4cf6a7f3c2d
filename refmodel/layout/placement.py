"""From which lane each page of an extent comes (laws O4, O6).

>>> from refmodel.layout.geometry import Extent, Grid
>>> from refmodel.layout.plan import plan_batch
>>> plan = plan_batch([Extent(0, 300)], Grid(4, 64), Split.PAGE_ALIGNED)
>>> page_lanes(plan, 0).tolist()
[0, 1, 2, 3, 3]
"""

from __future__ import annotations

import torch

from refmodel.layout.geometry import num_pages
from refmodel.layout.plan import Plan
from refmodel.layout.split import Split, balanced, segment_rank


def page_lanes(plan: Plan, request: int) -> torch.Tensor:
    """Lane of every page unit of a request's extent, [units], by page position.

    Page-aligned: the rank that computes the page (O4), so that its rows land in its own shard. Other splits
    give a page several compute ranks; its pages go round the lanes. Either way an extent of U units adds at
    most ceil(U / W) pages to a lane (O6).
    """
    units = plan.extents[request].page_positions(plan.grid.page_size)
    W, rotation = plan.grid.world_size, plan.rotations[request]
    if plan.split is not Split.PAGE_ALIGNED:
        return (torch.arange(units.start, units.stop) + rotation) % W
    ranks = torch.tensor([segment_rank(i, W, rotation) for i in range(2 * W)])
    return torch.repeat_interleave(ranks, torch.tensor(balanced(len(units), 2 * W)))


def new_page_lanes(plan: Plan, request: int) -> torch.Tensor:
    """Lanes of the pages to allocate: without the head page that a mid-page prefix already holds."""
    P = plan.grid.page_size
    extent = plan.extents[request]
    head = num_pages(extent.prefix, P) - extent.prefix // P
    return page_lanes(plan, request)[head:]
