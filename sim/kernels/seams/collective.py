"""Seams of the operations in :mod:`refmodel.ops.collective`. Their calls go by the reference's sites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from refmodel.collectives import at_site
from refmodel.storage.passage import Passage, gather_rows
from refmodel.storage.shard import Shard
from refmodel.storage.view import ViewIndex, materialize
from sim.kernels.seams.layout import shared_metadata
from sim.kernels.seams.seam import Kernel, seam
from sim.kernels.seams.storage import page_tables

Right = Callable[..., Any]


@seam("gather_rerange", gather_rows)
def gathered_rows(
    kernel: Kernel,
    right: Right,
    rows: torch.Tensor,
    passage: Passage,
    *,
    group: dist.ProcessGroup,
    site: str,
) -> torch.Tensor:
    with at_site(site):
        return kernel.one(rows, *shared_metadata(passage.plan), passage.plan.grid.page_size, group)


@seam("gather_materialize", materialize)
def gathered_view(
    kernel: Kernel, right: Right, shard: Shard, index: ViewIndex, *, group: dist.ProcessGroup, site: str
) -> torch.Tensor:
    layout = index.layout
    pages = layout.pages.to(shard.pages.device).split(layout.request_pages)
    with at_site(site):
        return kernel.one(
            shard.pages,
            page_tables(pages),
            layout.valid,
            layout.grid.page_size,
            shard.format.fields,
            group,
        )
