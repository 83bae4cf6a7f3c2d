"""The arithmetic of one layer, row by row: no cache, no ranks, no collectives (laws S6, S7, A5).

What needs other rows (choosing keys, attention) happens between :func:`project` and :func:`finish`, over
whatever view of the keys the caller has. Works in the type of the hidden rows, float64, float32 or bfloat16;
norms and rotations run in float64 or float32 and are rounded once. No row depends on another, there may be no
rows at all, and nothing waits for the device.

Rotary pairs are neighbours (dims 2i and 2i + 1) with angle p · theta^(−2i / dims). Left out, as they change
no product of a query with a key: the Hadamard transform of the indexer, which is orthogonal, and other ways
to pair dims, which are permutations. There is no MLP: it mixes no rows.

>>> rotate(torch.tensor([[1.0, 0.0]]), rotary_angles(torch.tensor([2]), 2, 10_000.0)).tolist()
[[-0.416146..., 0.909297...]]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from refmodel.errors import InvalidInput
from refmodel.model.shape import ModelShape
from refmodel.model.weights import LayerWeights, Weights


@dataclass(frozen=True, slots=True, eq=False)
class Projected:
    """What one layer asks and offers for each row, in the type of the hidden rows."""

    q: torch.Tensor  # [rows, heads, latent + rope], absorbed
    kv: torch.Tensor  # [rows, latent + rope]
    index_q: torch.Tensor  # [rows, index_heads, index_dim]
    index_weights: torch.Tensor  # [rows, index_heads], with the scale of the logits (A1)
    index_k: torch.Tensor  # [rows, index_dim]


def lookup(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of ``table`` [vocab, hidden] for ids [rows] int64 below vocab → [rows, hidden].

    A negative id is padding: its row is NaN, so that one that leaks into a real row shows (S9).
    """
    return torch.where((ids >= 0)[:, None], table[ids.clamp(min=0)], torch.nan)


def embed(ids: torch.Tensor, weights: Weights) -> torch.Tensor:
    """ids [rows] int64, −1 for padding → hidden rows [rows, hidden], NaN for padding."""
    return lookup(weights.embedding, ids)


def project(
    hidden: torch.Tensor, positions: torch.Tensor, layer: LayerWeights, shape: ModelShape
) -> Projected:
    """hidden [rows, hidden] at positions [rows] int64 in their requests → queries, KV rows and index rows.

    ``positions`` are absolute (S6): rows of a rank that counted from 0 would be rotated wrongly (A5).
    :class:`InvalidInput` unless there is one position a row.
    """
    _check_rows("positions of a layer", positions, hidden)
    x = _rms_norm(hidden, layer.norm, shape.eps)
    query = _rms_norm(x @ layer.q_down.mT, layer.q_norm, shape.eps)
    kv, index_k = project_keys(hidden, positions, layer, shape)
    angles = rotary_angles(positions, shape.rope, shape.rope_theta)
    index_angles = rotary_angles(positions, shape.index_rope, shape.rope_theta)
    index_q = torch.einsum("mr,hdr->mhd", query, layer.index_q)
    index_scale = (shape.index_heads * shape.index_dim) ** -0.5
    return Projected(
        q=_absorbed_query(query, angles, layer, shape),
        kv=kv,
        index_q=rotate(index_q, index_angles[:, None]),
        index_weights=x @ layer.index_weights.mT * index_scale,
        index_k=index_k,
    )


def project_keys(
    hidden: torch.Tensor, positions: torch.Tensor, layer: LayerWeights, shape: ModelShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`project` stores: KV rows [rows, latent + rope], index rows [rows, index_dim]."""
    x = _rms_norm(hidden, layer.norm, shape.eps)
    angles = rotary_angles(positions, shape.rope, shape.rope_theta)
    index_angles = rotary_angles(positions, shape.index_rope, shape.rope_theta)
    return _kv_rows(x, angles, layer, shape), rotate(_index_keys(x, layer, shape), index_angles)


def finish(hidden: torch.Tensor, out: torch.Tensor, layer: LayerWeights, shape: ModelShape) -> torch.Tensor:
    """hidden [rows, hidden] and attention's out [rows, heads, latent] → the next layer's hidden rows.

    ``out`` comes in the accumulating type and is rounded to the type of ``hidden`` here and only here: were
    each partial output rounded, the error would grow with their number (A5). :class:`InvalidInput` unless
    both have the same rows.
    """
    _check_rows("output of attention", out, hidden)
    values = torch.einsum("mhl,hvl->mhv", out.to(hidden.dtype), layer.v_up)
    return hidden + values.reshape(-1, shape.heads * shape.value) @ layer.out.mT


def head(hidden: torch.Tensor, weights: Weights) -> torch.Tensor:
    """hidden [rows, hidden] of the last layer → logits [rows, vocab]."""
    return _rms_norm(hidden, weights.norm, weights.shape.eps) @ weights.head.mT


def rotary_angles(positions: torch.Tensor, dims: int, theta: float) -> torch.Tensor:
    """positions [rows] int64 → [rows, dims / 2] angles in float64: in less, far positions would share one."""
    steps = torch.arange(0, dims, 2, dtype=torch.float64, device=positions.device)
    return positions[:, None] * theta ** (-steps / max(dims, 1))


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate the first 2 · pairs dims of x [rows, …, dims] by angles [rows, …, pairs]; the rest stays."""
    turned, rest = x.tensor_split([2 * angles.shape[-1]], -1)
    wide = _wide(turned)
    cos, sin = angles.cos().to(wide.dtype), angles.sin().to(wide.dtype)
    even, odd = wide[..., 0::2], wide[..., 1::2]
    pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
    return torch.cat([pairs.flatten(-2).to(x.dtype), rest], -1)


def _absorbed_query(
    query: torch.Tensor, angles: torch.Tensor, layer: LayerWeights, shape: ModelShape
) -> torch.Tensor:
    """q_nope · k_up ‖ rotated q_rope: times a KV row it gives the score of the expanded key."""
    nope, rope = torch.einsum("mr,hdr->mhd", query, layer.q_up).split([shape.nope, shape.rope], -1)
    return torch.cat([torch.einsum("mhn,hnl->mhl", nope, layer.k_up), rotate(rope, angles[:, None])], -1)


def _kv_rows(x: torch.Tensor, angles: torch.Tensor, layer: LayerWeights, shape: ModelShape) -> torch.Tensor:
    latent, rope = (x @ layer.kv_down.mT).split([shape.latent, shape.rope], -1)
    return torch.cat([_rms_norm(latent, layer.kv_norm, shape.eps), rotate(rope, angles)], -1)


def _index_keys(x: torch.Tensor, layer: LayerWeights, shape: ModelShape) -> torch.Tensor:
    keys = _wide(x @ layer.index_k.mT)
    weight, bias = _wide(layer.index_k_norm), _wide(layer.index_k_bias)
    return torch.layer_norm(keys, [shape.index_dim], weight, bias, shape.eps).to(x.dtype)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = _wide(x)
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight).to(x.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In the type that sums are kept in: float64 for float64, else float32."""
    return x if x.dtype is torch.float64 else x.float()


def _check_rows(what: str, tensor: torch.Tensor, hidden: torch.Tensor) -> None:
    # A single row would be broadcast over all of them, silently.
    if len(tensor) != len(hidden):
        raise InvalidInput(
            what, expected=f"{len(hidden)} rows, as the hidden rows", received=f"{len(tensor)}"
        )
