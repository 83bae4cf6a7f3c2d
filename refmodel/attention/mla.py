"""Dense causal attention in MLA's absorbed form, over a flattened K with row ranges (law A5).

One latent row serves as key and value: score = q · kv × sm_scale over all dims, value = the latent part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from refmodel.errors import InvalidInput
from refmodel.layout.geometry import at_least


@dataclass(frozen=True, slots=True)
class MlaShape:
    """Sizes of the attention; DeepSeek-V3.2 has 128 heads, 512 latent and 64 rope dims."""

    heads: int
    latent: int
    rope: int

    def __post_init__(self) -> None:
        for name in ("heads", "latent", "rope"):
            at_least(1, getattr(self, name), f"{name} of MLA")

    @property
    def width(self) -> int:
        """Elements of a KV row and of a query head."""
        return self.latent + self.rope


def dense_mla(
    q: torch.Tensor,
    kv: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    *,
    latent: int,
    sm_scale: float,
    chunk_rows: int = 256,
) -> torch.Tensor:
    """q [rows, heads, width], kv [keys, width], ks/ke [rows] → out [rows, heads, latent].

    Row i attends to keys ks[i] … ke[i] − 1; a row without keys gives 0 (A4). Rows are processed
    ``chunk_rows`` at a time, so that memory stays linear in keys.
    """
    if not len(q) == len(ks) == len(ke):
        raise InvalidInput(
            "rows of attention",
            expected=f"as many ks and ke as q rows, {len(q)}",
            received=f"{len(ks)} and {len(ke)}",
            fix="Cut q and its metadata by the same segment lengths (S5).",
        )
    if len(ke) and (int(ks.min()) < 0 or int(ke.max()) > len(kv)):
        raise InvalidInput(
            "keys of attention",
            expected=f"0 … {len(kv)}",
            received=f"ks from {int(ks.min())}, ke to {int(ke.max())}",
        )
    columns = torch.arange(len(kv), device=kv.device)
    chunks = [torch.empty((0, q.shape[1], latent), dtype=q.dtype, device=q.device)]
    for q_rows, start, stop in zip(
        q.split(chunk_rows), ks.split(chunk_rows), ke.split(chunk_rows), strict=True
    ):
        scores = torch.einsum("mhd,nd->mhn", q_rows, kv) * sm_scale
        visible = (columns >= start[:, None]) & (columns < stop[:, None])
        weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
        weights = torch.where(visible[:, None], weights, 0)  # a row without keys: 0, not NaN
        chunks.append(weights @ kv[:, :latent])
    return torch.cat(chunks)
