"""What a case computes when its caches hold a model's rows instead of identities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from refmodel.attention.transform import Transform
from refmodel.model.model import Model, build_model
from refmodel.model.shape import ModelShape
from refmodel.model.weights import Weights, seeded_weights
from refmodel.storage.identity import Cache, contents, pack

Ids = Literal["random", "equal", "zero"]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """A model and the token ids of its requests; all ranks make the same ones."""

    shape: ModelShape
    precision: str  # f64, f32, bf16 or fp8
    transform: Transform = Transform.PAGED
    ids: Ids = "random"
    seed: int = 0

    def weights(self) -> Weights:
        return seeded_weights(self.shape, self.seed)

    def model(self) -> Model:
        return build_model(self.weights(), self.precision, transform=self.transform)

    def tokens(self, request: int, stop: int) -> torch.Tensor:
        """The ids [stop] of a request: drawn, or all the same, or all of the token whose row is zero."""
        if self.ids != "random":
            return torch.full((stop,), int(self.ids == "equal"))
        return token_ids(request, stop, self.shape.vocab)


def token_ids(request: int, stop: int, vocab: int) -> torch.Tensor:
    """Ids [stop] of a request, below ``vocab``: drawn from who each token is."""
    tags = pack(request=request, position=torch.arange(stop), layer=0, cache=Cache.QUERY, write=0)
    drawn = contents(tags, 1, torch.float64)[:, 0]  # in [−1, 1)
    return ((drawn + 1) / 2 * vocab).to(torch.int64)
