"""Inputs in which a single token shows, whatever the precision (law A5).

Under random inputs every output element is a sum over all n keys. One of 8,192 has a weight of 1e-4, and its
absence changes an element by a thousandth of the largest one: less than what low precision costs anyway.
Here the latent dims are cut in two:

- The first tile, and the rope dims, make the scores. They are random and small, so that every key keeps a
  weight near 1/n.
- The other tiles are *payload*. Queries are 0 there, so it is no part of a score, only of the value. In each
  payload tile a key has one element, ± 2^ceil(log2 n), and zeros. Its dims, one a tile, are a code that no
  other key has, so a double and a key in another's place show as much as a gap.

An output element then sums n / tile keys instead of n, and their signs cancel: of any first keys, which are
what a row sees, all but one do. What is left is about as large as the share of one key. Signs go by the
Thue–Morse sequence, +−−+−++−…, so that they cancel within the pages of one rank, too: partial sums stay
small, and so does their rounding. Powers of two, alone in their tile, survive every format. The last rope
dim lowers the score of every real key by 12, so that a row of zeros, with score 0, outweighs 100,000 keys.

Rows are judged one by one: a row that sees 64 keys has outputs 128 times those of a row that sees 8,192.

>>> told = telling_inputs(rows=1, keys=8, shape=MlaShape(1, 12, 1), tile=4, sm_scale=1.0, seed=0)
>>> payload = told.kv[:, 4:12]  # two tiles, each dim used twice
>>> payload.abs().sum(1).tolist(), payload.sum(0).abs().max().item(), len(payload.unique(dim=0))
([16.0, 16.0, 16.0, 16.0, 16.0, 16.0, 16.0, 16.0], 0.0, 8)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from refmodel.errors import InvalidInput
from refmodel.layout.geometry import at_least

SCORE_SPREAD = 0.125  # standard deviation of a score: weights of a row are within a factor of about 3
SCORE_DROP = 12.0  # of every real key, below the score of a row of zeros


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


@dataclass(frozen=True, slots=True, eq=False)
class TellingInputs:
    """Queries and keys of one request, float64. Any row may stand at any position."""

    q: torch.Tensor  # [rows, heads, width]
    kv: torch.Tensor  # [keys, width]


def telling_inputs(
    rows: int, keys: int, shape: MlaShape, *, tile: int, sm_scale: float, seed: int
) -> TellingInputs:
    """Inputs for ``rows`` queries over ``keys`` keys, of a cache with a scale for each ``tile`` latent dims.

    :class:`InvalidInput` unless the latent dims are at least three whole tiles, and keys at most tile², which
    is how many codes two payload tiles have.
    """
    at_least(0, rows, "rows of telling inputs")
    at_least(1, tile, "tile of telling inputs")
    if shape.latent % tile or shape.latent < 3 * tile:
        raise InvalidInput(
            "latent width of telling inputs",
            expected=f"at least three whole tiles of {tile}",
            received=shape.latent,
            fix="One tile makes the scores, two or more are payload.",
        )
    if not 1 <= keys <= tile**2:
        raise InvalidInput("keys of telling inputs", expected=f"1 … {tile**2}, tile²", received=keys)
    generator = torch.Generator().manual_seed(seed)
    q = torch.zeros(rows, shape.heads, shape.width, dtype=torch.float64)
    kv = torch.zeros(keys, shape.width, dtype=torch.float64)
    scoring = torch.cat([torch.arange(tile), torch.arange(shape.latent, shape.width - 1)])
    gain = SCORE_SPREAD / (sm_scale * len(scoring) ** 0.5)
    q[..., scoring] = gain * torch.randn(rows, shape.heads, len(scoring), generator=generator).double()
    kv[:, scoring] = torch.randn(keys, len(scoring), generator=generator).double()
    q[..., -1], kv[:, -1] = SCORE_DROP / sm_scale, -1
    kv[:, tile : shape.latent] = _payload(keys, shape.latent // tile - 1, tile, generator)
    return TellingInputs(q, kv)


def _payload(keys: int, tiles: int, tile: int, generator: torch.Generator) -> torch.Tensor:
    """[keys, tiles × tile]: any ``tile`` keys from a multiple of it on use every dim of every tile once."""
    block, place = torch.arange(keys) // tile, torch.arange(keys) % tile
    block_signs = torch.ones(1, dtype=torch.int64)
    while len(block_signs) <= int(block[-1]):
        block_signs = torch.cat([block_signs, -block_signs])
    loud = 2 ** (keys - 1).bit_length()
    payload = torch.zeros(tiles, keys, tile, dtype=torch.float64)
    for i in range(tiles):
        order = torch.randperm(tile, generator=generator)
        signs = 1 - 2 * torch.randint(2, (tile,), generator=generator)
        # Tiles are turned by 0, 1, 2, … places a block: two of the dims tell place and block.
        dims = order[(place + i * block) % tile]
        payload[i, torch.arange(keys), dims] = (loud * block_signs[block] * signs[dims]).double()
    return payload.movedim(0, 1).flatten(1)
