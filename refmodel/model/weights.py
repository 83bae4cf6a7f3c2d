"""Weights from a seed, the same numbers in every precision (law A5).

They are drawn in float32 and rounded to what bfloat16 can hold: a run in fp64, fp32 or bf16 has exactly the
same model, so a difference of outputs is a difference of arithmetic.

>>> from refmodel.model.shape import TINY
>>> weights = seeded_weights(TINY, seed=0)
>>> layer = weights.layers[1]
>>> tuple(layer.q_up.shape), tuple(layer.kv_down.shape), tuple(layer.out.shape)
((2, 10, 14), (20, 32), (32, 10))
>>> bool((layer.q_up.bfloat16().float() == layer.q_up).all()), weights.embedding[0].any().item()
(True, False)
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from refmodel.layout.geometry import at_least
from refmodel.model.shape import ModelShape


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer. A matrix [outputs, inputs] is applied as x @ Wᵀ."""

    norm: torch.Tensor  # [hidden]
    q_down: torch.Tensor  # [q_rank, hidden]
    q_norm: torch.Tensor  # [q_rank]
    q_up: torch.Tensor  # [heads, nope + rope, q_rank]
    kv_down: torch.Tensor  # [latent + rope, hidden]
    kv_norm: torch.Tensor  # [latent]
    k_up: torch.Tensor  # [heads, nope, latent]
    v_up: torch.Tensor  # [heads, value, latent]
    out: torch.Tensor  # [hidden, heads · value]
    index_q: torch.Tensor  # [index_heads, index_dim, q_rank]
    index_k: torch.Tensor  # [index_dim, hidden]
    index_k_norm: torch.Tensor  # [index_dim], of a LayerNorm
    index_k_bias: torch.Tensor  # [index_dim], of the same; zeros
    index_weights: torch.Tensor  # [index_heads, hidden]

    def to(self, dtype: torch.dtype, device: torch.device | str) -> LayerWeights:
        """The same layer in another type or place."""
        return LayerWeights(*(tensor.to(device, dtype) for _, tensor in _tensors(self)))


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """All weights of a model. Row 0 of the embedding is zeros: so is its token's KV row in layer 0."""

    shape: ModelShape
    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [hidden], before the head
    head: torch.Tensor  # [vocab, hidden]

    def to(self, dtype: torch.dtype, device: torch.device | str) -> Weights:
        """The same weights in another type or place."""
        embedding, norm, head = (t.to(device, dtype) for t in (self.embedding, self.norm, self.head))
        return Weights(
            self.shape, embedding, tuple(layer.to(dtype, device) for layer in self.layers), norm, head
        )


def seeded_weights(
    shape: ModelShape, seed: int, *, layers: int | None = None, vocab: int | None = None
) -> Weights:
    """Weights in float32 on the CPU, of values that bfloat16 holds exactly.

    ``layers`` and ``vocab`` take the place of the shape's: one layer of a large model is enough for a check,
    and its embedding would be most of the memory. :class:`InvalidInput` for a seed below 0, or sizes below 1.
    """
    at_least(0, seed, "seed of the weights")
    shape = replace(
        shape,
        layers=shape.layers if layers is None else layers,
        vocab=shape.vocab if vocab is None else vocab,
    )
    generator = torch.Generator().manual_seed(seed)
    stack = tuple(_layer(shape, generator) for _ in range(shape.layers))
    embedding = _rounded(torch.randn(shape.vocab, shape.hidden, generator=generator))
    embedding[0] = 0
    norm, head = _norm(generator, shape.hidden), _matrix(generator, shape.vocab, shape.hidden)
    return Weights(shape, embedding, stack, norm, head)


def arrays(weights: Weights) -> dict[str, npt.NDArray[np.floating[Any]]]:
    """The weights by name, for the oracle: "embedding", "norm", "head", "layers.0.q_down", … of each layer.

    float32 or float64 as they are, without a copy where numpy can share; bf16 is widened. The oracle turns to
    float64 what it needs at a time, which is exact: a whole layer of DeepSeek-V3.2 would be 1.6 GB.
    """
    named = {"embedding": weights.embedding, "norm": weights.norm, "head": weights.head}
    for i, layer in enumerate(weights.layers):
        named |= {f"layers.{i}.{name}": tensor for name, tensor in _tensors(layer)}
    return {
        name: (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).cpu().numpy()
        for name, tensor in named.items()
    }


def _tensors(layer: LayerWeights) -> list[tuple[str, torch.Tensor]]:
    return [(field.name, getattr(layer, field.name)) for field in fields(layer)]


def _layer(shape: ModelShape, generator: torch.Generator) -> LayerWeights:
    s = shape
    return LayerWeights(
        norm=_norm(generator, s.hidden),
        q_down=_matrix(generator, s.q_rank, s.hidden),
        q_norm=_norm(generator, s.q_rank),
        q_up=_matrix(generator, s.heads, s.nope + s.rope, s.q_rank),
        kv_down=_matrix(generator, s.width, s.hidden),
        kv_norm=_norm(generator, s.latent),
        k_up=_matrix(generator, s.heads, s.nope, s.latent),
        v_up=_matrix(generator, s.heads, s.value, s.latent),
        out=_matrix(generator, s.hidden, s.heads * s.value),
        index_q=_matrix(generator, s.index_heads, s.index_dim, s.q_rank),
        index_k=_matrix(generator, s.index_dim, s.hidden),
        index_k_norm=_norm(generator, s.index_dim),
        # A bias would give the all-zero token an index key, and its tile would not be all zeros (F1).
        index_k_bias=torch.zeros(s.index_dim),
        index_weights=_matrix(generator, s.index_heads, s.hidden),
    )


def _matrix(generator: torch.Generator, *sizes: int) -> torch.Tensor:
    """Signed, scaled so that outputs are about as large as inputs."""
    return _rounded(torch.randn(sizes, generator=generator).mul_(sizes[-1] ** -0.5))


def _norm(generator: torch.Generator, size: int) -> torch.Tensor:
    """½ … 1½: a norm whose weights were all 1 would not show when they are left out."""
    return _rounded(torch.rand(size, generator=generator).add_(0.5))


def _rounded(drawn: torch.Tensor) -> torch.Tensor:
    return drawn.copy_(drawn.bfloat16())
