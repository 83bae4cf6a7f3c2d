"""Seams of the operations in :mod:`refmodel.ops.attention` and :mod:`refmodel.ops.topk`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from refmodel.attention import sharded
from refmodel.attention.accumulating import accumulating_type
from refmodel.attention.indexer import mqa_logits
from refmodel.attention.merge import merge_attended, merge_top_k
from refmodel.attention.ranges import KeyRanges
from refmodel.attention.sparse import Attended, Chosen, sparse_mla
from refmodel.attention.transform import Transform
from refmodel.model import attend
from refmodel.model.attend import Views, choose_rows, index_logits, rows_of_view
from refmodel.model.batch import HalfRows
from refmodel.model.layer import Projected
from refmodel.model.model import Model
from refmodel.storage.view import CompactTable
from sim.kernels.seams.seam import Kernel, Unsuited, seam
from sim.kernels.seams.storage import page_tables

Right = Callable[..., Any]


@seam("mqa_logits", mqa_logits)
def logits_of(
    kernel: Kernel,
    right: Right,
    q: torch.Tensor,
    keys: torch.Tensor,
    scale: torch.Tensor | None,
    weights: torch.Tensor,
    ranges: KeyRanges,
) -> torch.Tensor:
    q, keys = _of_one_type(q, keys)
    wide = accumulating_type(q, keys)
    scale = torch.ones(len(keys), device=keys.device) if scale is None else scale
    return kernel.one(q, keys, scale, weights.to(wide), ranges.ks, ranges.ke).to(wide)


def _of_one_type(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As they are if they are alike, else in the accumulating type."""
    if len({tensor.dtype for tensor in tensors}) == 1:
        return tensors
    return tuple(tensor.to(accumulating_type(*tensors)) for tensor in tensors)


# -- the choice --------------------------------------------------------------------------------------------


@seam("topk_transform_paged", choose_rows)
def choose_slots(
    kernel: Kernel,
    right: Right,
    projected: Projected,
    views: Views,
    half: HalfRows,
    compact: Sequence[CompactTable],
    model: Model,
) -> tuple[torch.Tensor, torch.Tensor]:
    if model.transform is not Transform.PAGED:
        return right(projected, views, half, compact, model)
    addressing, ranges = half.addressing, half.ranges
    slots = kernel.one(
        index_logits(projected, views, ranges, model),
        ranges.ks,
        ranges.ke,
        model.shape.top_k,
        page_tables(addressing.tables),
        addressing.cu_seqlens_q,
        addressing.page_size,
    ).to(torch.int64)
    view_rows = rows_of_view(slots, addressing, compact, Transform.PAGED)
    return addressing.undo(slots, Transform.PAGED), view_rows


@seam("topk_transform_ragged", choose_rows)
def choose_flattened_rows(
    kernel: Kernel,
    right: Right,
    projected: Projected,
    views: Views,
    half: HalfRows,
    compact: Sequence[CompactTable],
    model: Model,
) -> tuple[torch.Tensor, torch.Tensor]:
    if model.transform is not Transform.RAGGED:
        return right(projected, views, half, compact, model)
    ranges, starts = half.ranges, half.addressing.row_starts
    logits = index_logits(projected, views, ranges, model)
    rows = kernel.one(logits, ranges.ks, ranges.ke, model.shape.top_k, starts).to(torch.int64)
    return half.addressing.undo(rows, Transform.RAGGED), rows


@seam("topk_merge", merge_top_k)
def best_of_parts(
    kernel: Kernel, right: Right, logits: torch.Tensor, keys: torch.Tensor, k: int
) -> torch.Tensor:
    return kernel.one(logits, keys, k).to(keys.dtype)


# -- attention ---------------------------------------------------------------------------------------------


def _attended(
    kernel: Kernel, q: torch.Tensor, kv: torch.Tensor, chosen: Chosen, latent: int, sm_scale: float
) -> Attended:
    if not len(kv):
        raise Unsuited
    wide = accumulating_type(q, kv)
    out, lse = kernel(*_of_one_type(q, kv), chosen.rows, latent, sm_scale)
    return Attended(out.to(wide), lse.to(wide))


@seam("sparse_mla", sparse_mla, within=attend)
def attend_to_view(
    kernel: Kernel,
    right: Right,
    q: torch.Tensor,
    kv: torch.Tensor,
    chosen: Chosen,
    *,
    latent: int,
    sm_scale: float,
    chunk_elements: int = 0,
) -> Attended:
    return _attended(kernel, q, kv, chosen, latent, sm_scale)


@seam("sparse_mla", sparse_mla, within=sharded)
def attend_to_shard(
    kernel: Kernel,
    right: Right,
    q: torch.Tensor,
    kv: torch.Tensor,
    chosen: Chosen,
    *,
    latent: int,
    sm_scale: float,
    chunk_elements: int = 0,
) -> Attended:
    """In the accumulating type: each partial output that is rounded would add to the error (A5)."""
    wide = accumulating_type(q, kv)
    return _attended(kernel, q.to(wide), kv.to(wide), chosen, latent, sm_scale)


@seam("lse_merge", merge_attended)
def merged(kernel: Kernel, right: Right, parts: Sequence[Attended]) -> Attended:
    out, lse = kernel(torch.stack([part.out for part in parts]), torch.stack([part.lse for part in parts]))
    return Attended(out, lse)
