"""Scores of the sparse-attention indexer, and the keys they choose (law A1).

Many query heads share one index key a token. Two heads, of which the second is weighed against the first:

>>> q, keys = torch.tensor([[[1.0], [-1.0]]]), torch.tensor([[2.0], [-3.0], [5.0]])
>>> ranges = KeyRanges(torch.tensor([0]), torch.tensor([2]), num_keys=3)
>>> mqa_logits(q, keys, torch.tensor([0.5, 1.0, 1.0]), torch.tensor([[1.0, -1.0]]), ranges).tolist()
[[1.0, -3.0, nan]]
"""

from __future__ import annotations

import torch

from refmodel.attention.accumulating import accumulating_type
from refmodel.attention.chunks import row_chunks
from refmodel.attention.ranges import KeyRanges
from refmodel.attention.topk import top_k


def mqa_logits(
    q: torch.Tensor,
    keys: torch.Tensor,
    scale: torch.Tensor | None,
    weights: torch.Tensor,
    ranges: KeyRanges,
) -> torch.Tensor:
    """logit[m, n] = Σ_h weights[m, h] · relu(q[m, h] · keys[n]) · scale[n] (A1).

    q [rows, heads, dim], keys [keys, dim], scale [keys] or None for 1, weights [rows, heads] → logits
    [rows, keys] in the accumulating type. Outside [ks, ke) a logit is NaN: kernels leave it undefined there,
    and a reader that uses it should be found out.
    """
    ranges.require(len(q), len(keys), "the indexer")
    dtype = accumulating_type(q, keys)
    dots = torch.einsum("mhd,nd->mhn", q.to(dtype), keys.to(dtype)).relu_()
    logits = torch.einsum("mh,mhn->mn", weights.to(dtype), dots)
    if scale is not None:
        logits = logits * scale.to(dtype)
    return logits.masked_fill_(~ranges.visible(), torch.nan)


def choose(
    q: torch.Tensor,
    keys: torch.Tensor,
    scale: torch.Tensor | None,
    weights: torch.Tensor,
    ranges: KeyRanges,
    k: int,
    *,
    chunk_elements: int = 1 << 24,
) -> torch.Tensor:
    """[rows, k] int64: the positions that each row chooses in its own request, −1 behind (A1, A2).

    As ``top_k`` of ``mqa_logits``, a few rows at a time: products of all heads, [rows, heads, keys], hold at
    most ``chunk_elements`` elements, or one row.
    """
    keys = keys.to(accumulating_type(q, keys))  # once, not once a chunk
    chunks = row_chunks(len(q), elements_a_row=q.shape[1] * len(keys), chunk_elements=chunk_elements)
    return torch.cat(
        [
            top_k(mqa_logits(q[rows], keys, scale, weights[rows], ranges[rows]), ranges[rows], k)
            for rows in chunks
        ]
    )
