"""Ranks that do not call the same collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from properties.mutants.mutant import Right, mutant
from refmodel import collectives
from refmodel.collectives import all_gather_rows
from refmodel.layout import rows
from refmodel.storage import view
from refmodel.storage.shard import Shard
from refmodel.storage.view import ViewIndex


@mutant(
    collectives.rank_and_size,
    "split-14",
    "S8",
    "V6",
    source="reported in sglang#24560",
)
def of_another_group(group: dist.ProcessGroup) -> tuple[int, int]:
    """Rank and size of the tensor-parallel group, of size 1, instead of the CP group's."""
    return 0, 1


@mutant(collectives.gather_buffers, "view-04", "V6", source="reported in vllm#53573")
def empty_rank_skips(
    right: Right, sent: torch.Tensor, counts: Sequence[int], *, group: dist.ProcessGroup, site: str
) -> torch.Tensor:
    """A rank without rows skips the gather: the others wait for it."""
    if not len(sent):
        return sent.new_empty((len(counts) * max(counts), *sent.shape[1:]))
    return right(sent, counts, group=group, site=site)


@mutant(view.materialize, "view-05", "V6", source="reported in TensorRT-LLM#14020")
def branch_on_local_capacity(
    right: Right, shard: Shard, index: ViewIndex, *, group: dist.ProcessGroup, site: str
) -> torch.Tensor:
    """A rank with many pages of its own gathers once more, to make room: the others do not."""
    counts = index.layout.page_counts
    if counts[shard.rank] > min(counts):
        all_gather_rows(shard.rows[:0], [0] * len(counts), group=group, site="spill")
    return right(shard, index, group=group, site=site)


@mutant(collectives.gather_buffers, "view-06", "V6", source="reported in ucc#1300")
def one_rank_rejects_the_type(
    right: Right, sent: torch.Tensor, counts: Sequence[int], *, group: dist.ProcessGroup, site: str
) -> torch.Tensor:
    """The last rank does not take the type and sends another: a fallback of its own."""
    if group.size() > 1 and group.rank() == group.size() - 1:
        return right(sent.to(torch.float16), counts, group=group, site=site).to(sent.dtype)
    return right(sent, counts, group=group, site=site)


@mutant(rows.pad_rows, "view-08", "V6")
def uneven_contributions(sent: torch.Tensor, length: int) -> torch.Tensor:
    """Rows are sent as they are: gloo returns early on an empty rank and leaves the others' data wrong."""
    return sent.contiguous()
