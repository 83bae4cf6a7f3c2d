"""Cases of the operations in :mod:`refmodel.ops.quantize`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from typing_extensions import Self

from properties.kernels.cases.case import Case
from properties.kernels.cases.values import SEEDS, TYPES, mla_parts, repeated, seeded
from refmodel.ops.op import Op
from refmodel.ops.quantize import QUANTIZE_INDEX, QUANTIZE_MLA

_DISTINCT_ROWS = 65_537  # a prime, so that rows differ wherever an offset of 32 bits would wrap
FLOATS = st.sampled_from(["f32", "bf16"])


def _unequal(shape: tuple[int, int, int], zeros: int, generator: torch.Generator) -> torch.Tensor:
    """fp32 [n, tiles, tile]: tiles of very unequal magnitude, in some also the elements; a few all zero.

    Magnitudes go down to where 1e-4 is the larger, and up to where fp8 without a scale would overflow.
    """
    n, tiles, tile = shape
    values = torch.randn(shape, generator=generator)
    magnitude = torch.randint(-24, 13, (n, tiles, 1), generator=generator)
    spread = torch.randint(0, 2, (n, tiles, 1), generator=generator)
    spread = spread * torch.randint(-12, 1, shape, generator=generator)
    values = values * 2.0 ** (magnitude + spread)
    if zeros:
        values.view(n * tiles, tile)[zeros - 1 :: zeros] = 0
    return values


@dataclass(frozen=True, kw_only=True)
class QuantizeIndex(Case):
    """Keys of very unequal magnitude."""

    op: ClassVar[Op] = QUANTIZE_INDEX

    rows: int
    dim: int
    zeros: int = 0  # every so many keys is all zero; 0: none is
    dtype: str = "f32"

    def arguments(self) -> dict[str, Any]:
        distinct = min(self.rows, _DISTINCT_ROWS)
        values = _unequal((distinct, 1, self.dim), self.zeros, seeded(self.seed))
        return {"keys": repeated(values[:, 0].to(TYPES[self.dtype]), self.rows)}

    @classmethod
    def corners(cls) -> Iterator[Self]:
        yield cls(rows=0, dim=8)
        yield cls(rows=1, dim=8)
        yield cls(rows=1, dim=8, zeros=1)
        yield cls(rows=9, dim=128, zeros=3)
        yield cls(rows=9, dim=128, zeros=3, dtype="bf16")
        yield cls(rows=500, dim=128)

    @classmethod
    def huge(cls) -> Self:
        return cls(rows=8_400_000, dim=128, dtype="bf16")

    @classmethod
    def strategy(cls) -> st.SearchStrategy[Self]:
        return st.builds(
            cls,
            rows=st.integers(0, 20),
            dim=st.sampled_from([8, 128, 5, 1]),
            zeros=st.integers(0, 4),
            dtype=FLOATS,
            seed=SEEDS,
        )


@dataclass(frozen=True, kw_only=True)
class QuantizeMla(Case):
    """Rows whose tiles are of very unequal magnitude; fp32 rope that bf16 does not hold exactly."""

    op: ClassVar[Op] = QUANTIZE_MLA

    rows: int
    latent: int
    rope: int
    tile: int
    zeros: int = 0  # every so many tiles is all zero; 0: none is
    dtype: str = "f32"

    def arguments(self) -> dict[str, Any]:
        generator, tiles = seeded(self.seed), self.latent // self.tile
        distinct = min(self.rows, _DISTINCT_ROWS)
        latent = _unequal((distinct, tiles, self.tile), self.zeros, generator).flatten(1)
        rope = torch.randn(distinct, self.rope, generator=generator)
        rows = torch.cat([latent, rope], 1).to(TYPES[self.dtype])
        return {"rows": repeated(rows, self.rows), "latent": self.latent, "tile": self.tile}

    @property
    def row_width(self) -> int:
        return self.latent + self.rope

    def with_width(self, width: int) -> Self | None:
        parts = mla_parts(width)
        return None if parts is None else replace(self, latent=4 * parts[0], tile=parts[0], rope=parts[1])

    @classmethod
    def corners(cls) -> Iterator[Self]:
        yield cls(rows=0, latent=8, rope=2, tile=4)
        yield cls(rows=1, latent=8, rope=2, tile=4)
        yield cls(rows=1, latent=8, rope=2, tile=4, zeros=1)
        yield cls(rows=5, latent=6, rope=3, tile=2, zeros=3)
        yield cls(rows=9, latent=512, rope=64, tile=128, zeros=5)
        yield cls(rows=9, latent=512, rope=64, tile=128, zeros=5, dtype="bf16")
        yield cls(rows=200, latent=512, rope=64, tile=128)

    @classmethod
    def huge(cls) -> Self:
        return cls(rows=1_900_000, latent=512, rope=64, tile=128, dtype="bf16")

    @classmethod
    def strategy(cls) -> st.SearchStrategy[Self]:
        return st.builds(
            lambda sizes, **others: cls(latent=sizes[0], rope=sizes[1], tile=sizes[2], **others),
            st.sampled_from([(8, 2, 4), (6, 3, 2), (3, 0, 3), (512, 64, 128)]),
            rows=st.integers(0, 12),
            zeros=st.integers(0, 4),
            dtype=FLOATS,
            seed=SEEDS,
        )
