"""Wrong kernels of operations that read rows in order: the offset of a row's first byte has too few bits.

As in :mod:`properties.kernels.adversaries.offsets`, 12 bits show on any machine and 32 in gigabytes only.
"""

from __future__ import annotations

import torch

from properties.kernels.adversaries.adversary import adversary
from properties.kernels.adversaries.offsets import BITS_12, BITS_32
from refmodel.ops.attention import LSE_MERGE
from refmodel.ops.layout import page_aligned_plan
from refmodel.ops.op import Results
from refmodel.ops.quantize import QUANTIZE_INDEX, QUANTIZE_MLA
from refmodel.ops.topk import TOPK_MERGE

Tensor = torch.Tensor
Ints = tuple[int, ...]


def _wrapped(rows: Tensor, wrap: int) -> Tensor:
    """What a kernel reads for rows [n, …] if the offset of a row's first byte wraps."""
    starts = torch.arange(len(rows), device=rows.device) * rows[:1].nbytes
    return rows[starts % wrap // max(1, rows[:1].nbytes)]


@adversary("zigzag_split", law="S2")
def split_offsets_in_12_bits(
    rows: Tensor, prefixes: Ints, tokens: Ints, rank: int, world_size: int, page_size: int
) -> Tensor:
    """Byte offsets wrap at 2¹²: right of fewer bytes."""
    return page_aligned_plan(prefixes, tokens, world_size, page_size).take(_wrapped(rows, BITS_12), rank)


@adversary("zigzag_split", law="S2", huge=True)
def split_offsets_in_32_bits(
    rows: Tensor, prefixes: Ints, tokens: Ints, rank: int, world_size: int, page_size: int
) -> Tensor:
    """Byte offsets wrap at 2³¹: right of fewer bytes."""
    return page_aligned_plan(prefixes, tokens, world_size, page_size).take(_wrapped(rows, BITS_32), rank)


@adversary("rerange", law="S4")
def rerange_offsets_in_12_bits(
    buffers: Tensor, prefixes: Ints, tokens: Ints, world_size: int, page_size: int
) -> Tensor:
    """Byte offsets wrap at 2¹²: right of fewer bytes."""
    return page_aligned_plan(prefixes, tokens, world_size, page_size).rerange(_wrapped(buffers, BITS_12))


@adversary("rerange", law="S4", huge=True)
def rerange_offsets_in_32_bits(
    buffers: Tensor, prefixes: Ints, tokens: Ints, world_size: int, page_size: int
) -> Tensor:
    """Byte offsets wrap at 2³¹: right of fewer bytes."""
    return page_aligned_plan(prefixes, tokens, world_size, page_size).rerange(_wrapped(buffers, BITS_32))


@adversary("local_embedding", law="D1")
def table_offsets_in_12_bits(ids: Tensor, table: Tensor, max_rank_rows: int) -> Tensor:
    """Byte offsets wrap at 2¹²: right in a table of fewer bytes."""
    return _wrapped(table, BITS_12)[ids.long()]


@adversary("local_embedding", law="D1", huge=True)
def table_offsets_in_32_bits(ids: Tensor, table: Tensor, max_rank_rows: int) -> Tensor:
    """Byte offsets wrap at 2³¹: right in a table of fewer bytes."""
    return _wrapped(table, BITS_32)[ids.long()]


@adversary("quantize_index", law="F1")
def key_offsets_in_12_bits(keys: Tensor) -> Results:
    """Byte offsets wrap at 2¹²: right of fewer bytes."""
    return QUANTIZE_INDEX.reference(_wrapped(keys, BITS_12))


@adversary("quantize_index", law="F1", huge=True)
def key_offsets_in_32_bits(keys: Tensor) -> Results:
    """Byte offsets wrap at 2³¹: right of fewer bytes."""
    return QUANTIZE_INDEX.reference(_wrapped(keys, BITS_32))


@adversary("quantize_mla", law="F1")
def row_offsets_in_12_bits(rows: Tensor, latent: int, tile: int) -> Results:
    """Byte offsets wrap at 2¹²: right of fewer bytes."""
    return QUANTIZE_MLA.reference(_wrapped(rows, BITS_12), latent, tile)


@adversary("quantize_mla", law="F1", huge=True)
def row_offsets_in_32_bits(rows: Tensor, latent: int, tile: int) -> Results:
    """Byte offsets wrap at 2³¹: right of fewer bytes."""
    return QUANTIZE_MLA.reference(_wrapped(rows, BITS_32), latent, tile)


@adversary("lse_merge", law="A6")
def part_offsets_in_12_bits(outs: Tensor, lses: Tensor) -> Results:
    """Byte offsets wrap at 2¹²: right of fewer bytes."""
    return LSE_MERGE.reference(_wrapped(outs.flatten(0, 2), BITS_12).view(outs.shape), lses)


@adversary("lse_merge", law="A6", huge=True)
def part_offsets_in_32_bits(outs: Tensor, lses: Tensor) -> Results:
    """Byte offsets wrap at 2³¹: right of fewer bytes."""
    return LSE_MERGE.reference(_wrapped(outs.flatten(0, 2), BITS_32).view(outs.shape), lses)


@adversary("topk_merge", law="A6")
def candidate_offsets_in_12_bits(logits: Tensor, keys: Tensor, k: int) -> Results:
    """Byte offsets of keys wrap at 2¹²: right of fewer bytes."""
    return TOPK_MERGE.reference(logits, _wrapped(keys.flatten(0, 1), BITS_12).view(keys.shape), k)


@adversary("topk_merge", law="A6", huge=True)
def candidate_offsets_in_32_bits(logits: Tensor, keys: Tensor, k: int) -> Results:
    """Byte offsets of keys wrap at 2³¹: right of fewer bytes."""
    return TOPK_MERGE.reference(logits, _wrapped(keys.flatten(0, 1), BITS_32).view(keys.shape), k)
