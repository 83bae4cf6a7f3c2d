"""Wrong arithmetic over a right view."""

from __future__ import annotations

import torch

from properties.mutants.mutant import Right, mutant
from refmodel.attention import mla


@mutant(mla.dense_mla, "causal-off-by-one", "A5")
def one_key_too_few(
    right: Right, q: torch.Tensor, kv: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor, **options: float
) -> torch.Tensor:
    """A row does not see itself, unless it would see nothing."""
    return right(q, kv, ks, torch.maximum(ke - 1, torch.minimum(ks + 1, ke)), **options)


@mutant(mla.dense_mla, "value-from-the-wrong-end", "A5")
def value_includes_rope(
    right: Right, q: torch.Tensor, kv: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor, **options: float
) -> torch.Tensor:
    """The value is the last dims of the row instead of the latent part."""
    latent = int(options["latent"])
    rope = kv.shape[1] - latent
    swapped = torch.cat([kv[:, rope:], kv[:, :rope]], 1)
    turned = torch.cat([q[..., rope:], q[..., :rope]], -1)
    return right(turned, swapped, ks, ke, **options)
