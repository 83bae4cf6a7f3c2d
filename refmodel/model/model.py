"""A model ready to serve: weights in the type of its hidden rows, and the formats of its two caches.

>>> from refmodel.model.shape import TINY
>>> from refmodel.model.weights import seeded_weights
>>> model = build_model(seeded_weights(TINY, seed=0), "fp8")
>>> model.weights.norm.dtype, {cache.name: f.name for cache, f in model.formats.items()}
(torch.bfloat16, {'KV': 'mla_fp8', 'INDEX': 'index_fp8'})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from refmodel.attention.transform import Transform
from refmodel.model.shape import ModelShape
from refmodel.model.weights import Weights
from refmodel.storage.formats import Format, index_format, mla_format
from refmodel.storage.identity import Cache

# Of hidden rows and weights. With caches in fp8 everything else is bf16, as engines have it.
_HIDDEN = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """Weights, formats, and how the indexer names what it chose (A3). Arithmetic is where the weights are."""

    weights: Weights
    formats: Mapping[Cache, Format]
    transform: Transform = Transform.PAGED

    @property
    def shape(self) -> ModelShape:
        return self.weights.shape

    @property
    def device(self) -> torch.device:
        return self.weights.norm.device

    def pack(self, cache: Cache, values: torch.Tensor) -> torch.Tensor:
        """Values [rows, width] → packed rows of a cache."""
        return self.formats[cache].pack(values)


def cache_formats(shape: ModelShape, precision: str) -> dict[Cache, Format]:
    """The formats of both caches, of one precision: ``f64``, ``f32``, ``bf16`` or ``fp8``."""
    kv = mla_format(precision, latent=shape.latent, rope=shape.rope, tile=shape.quant_tile)
    return {Cache.KV: kv, Cache.INDEX: index_format(precision, shape.index_dim)}


def build_model(
    weights: Weights,
    precision: str,
    *,
    transform: Transform = Transform.PAGED,
    device: torch.device | None = None,
) -> Model:
    """A model of these weights; hidden rows are float64, float32, or bf16 (also with fp8 caches)."""
    formats = cache_formats(weights.shape, precision)  # refuses a precision that does not exist
    return Model(weights.to(_HIDDEN[precision], device or torch.device("cpu")), formats, transform)
