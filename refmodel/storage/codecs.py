"""Elements of a row as bytes: plain types, and fp8 with scales (law F1).

A scale is max(amax, 1e-4) / 448, in fp32, so that the largest element becomes the largest fp8 and an all-zero
tile becomes zeros instead of 0/0.

>>> elements, scale = quantize(torch.tensor([[0.0, 0.0], [1.0, 896.0]]))
>>> elements.float().tolist(), [round(each * 448, 4) for each in scale.flatten().tolist()]
([[0.0, 0.0], [0.5, 448.0]], [0.0001, 896.0])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from refmodel.errors import InvalidInput

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
LEAST_AMAX = 1e-4


class Codec(Protocol):
    """Between values [n, width] and packed rows, uint8 [n, bytes a token]."""

    @property
    def fields(self) -> tuple[int, ...]:
        """Bytes a token of each field; a packed row is field 0, then field 1, …"""

    def pack(self, values: torch.Tensor) -> torch.Tensor: ...

    def unpack(self, packed: torch.Tensor) -> torch.Tensor: ...


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """[…, width] of any type → its bytes, uint8 […, width × itemsize]."""
    # Flat in between: a contiguous tensor may have any stride in a dim of size 1.
    flat = rows.contiguous().view(-1).view(torch.uint8)
    return flat.view(*rows.shape[:-1], rows.shape[-1] * rows.dtype.itemsize)


def as_type(field: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A field of packed rows, uint8 [n, bytes] → [n, elements]. Copied: in a row it may not be aligned."""
    return field.clone(memory_format=torch.contiguous_format).view(dtype)


def quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[…, n] → (fp8 [..., n], fp32 scale [..., 1]): values ≈ fp8 · scale. One scale for the last dim."""
    tile = values.to(torch.float32)
    amax = tile.abs().amax(-1, keepdim=True).clamp(min=LEAST_AMAX)
    # By a tensor: by a number a GPU multiplies with its reciprocal, which rounds once more.
    scale = amax / torch.full_like(amax, FP8_MAX)
    return (tile / scale).to(FP8), scale


@dataclass(frozen=True, slots=True)
class Plain:
    """Elements as they are."""

    dtype: torch.dtype
    width: int

    @property
    def fields(self) -> tuple[int, ...]:
        return (self.width * self.dtype.itemsize,)

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        return as_bytes(values.to(self.dtype))

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        return packed.contiguous().view(self.dtype)


@dataclass(frozen=True, slots=True)
class ScaledLatent:
    """MLA in fp8: the latent part as fp8, a scale for each ``tile`` of it, the rope part as bf16."""

    latent: int
    rope: int
    tile: int

    def __post_init__(self) -> None:
        if self.latent % self.tile:
            raise InvalidInput(
                "latent width of mla_fp8",
                expected=f"a multiple of the tile, {self.tile}",
                received=self.latent,
                fix="Each tile has one scale; choose a tile that divides the width.",
            )

    @property
    def fields(self) -> tuple[int, ...]:
        return (self.latent + self.latent // self.tile * 4 + self.rope * 2,)

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        latent, rope = values.split((self.latent, self.rope), -1)
        elements, scales = quantize(latent.unflatten(-1, (-1, self.tile)))
        parts = elements.flatten(-2), scales.flatten(-2), rope.to(torch.bfloat16)
        return torch.cat([as_bytes(part) for part in parts], -1)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        tiles = self.latent // self.tile
        elements, scales, rope = packed.split((self.latent, 4 * tiles, 2 * self.rope), -1)
        tiled = as_type(elements, FP8).to(torch.float32).unflatten(-1, (tiles, self.tile))
        latent = tiled * as_type(scales, torch.float32)[..., None]
        return torch.cat([latent.flatten(-2), as_type(rope, torch.bfloat16).to(torch.float32)], -1)


@dataclass(frozen=True, slots=True)
class ScaledKey:
    """An index key in fp8, and its one scale: in a page all keys stand before all scales."""

    width: int

    @property
    def fields(self) -> tuple[int, ...]:
        return (self.width, 4)

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        elements, scale = quantize(values)
        return torch.cat([as_bytes(elements), as_bytes(scale)], -1)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        elements, scale = self.parts(packed)
        return elements * scale[:, None]

    def parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys fp32 [n, width] without their scale, scale fp32 [n]), as the indexer takes them (A1)."""
        elements, scale = packed.split(self.fields, -1)
        keys = as_type(elements, FP8).to(torch.float32)
        return keys, as_type(scale, torch.float32).flatten()
