"""What cases fill tensors with."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import torch
from hypothesis import strategies as st

TYPES = MappingProxyType(
    {
        "bf16": torch.bfloat16,
        "f32": torch.float32,
        "f64": torch.float64,
        "fp8": torch.float8_e4m3fn,
        "uint8": torch.uint8,
    }
)
POISON = 0xFF  # a byte of which all are: NaN in floats, −1 in integers
SEEDS = st.integers(0, 2**16)
PAGE_SIZES = st.sampled_from([2, 1, 3, 16, 64])

# A prime, so that what repeats after it differs wherever an offset of 32 bits would wrap.
_MOST_ELEMENTS = 16_777_213


def mla_parts(width: int) -> tuple[int, int] | None:
    """(tile, rope) of MLA rows of this width, with four tiles; None if it is too small.

    >>> mla_parts(576)
    (128, 64)
    """
    return next(((tile, width - 4 * tile) for tile in (128, 64, 16, 4, 2) if 4 * tile < width), None)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Finite numbers of any dtype, or any bytes."""

    def draw(count: int) -> torch.Tensor:
        if dtype is torch.uint8:
            return torch.randint(0, 256, (count,), dtype=dtype, generator=generator)
        return torch.randn(count, generator=generator).to(dtype)

    return filled(shape, draw)


def filled(shape: tuple[int, ...], draw: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Elements of which ``draw(count)`` gives [count]; of gigabytes only the first, which are repeated."""
    count = torch.Size(shape).numel()
    return repeated(draw(min(count, _MOST_ELEMENTS)), count).view(shape)


def repeated(rows: torch.Tensor, count: int) -> torch.Tensor:
    """[count, …]: these rows [n, …] over and over."""
    if len(rows) == count:
        return rows
    return rows.repeat(-(-count // len(rows)), *[1] * (rows.dim() - 1))[:count]


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What must never be read."""
    tensor = torch.empty(shape, dtype=dtype)
    tensor.view(torch.uint8).fill_(POISON)
    return tensor


def scrambled_pages(
    count: int, lanes: range, world_size: int, local_pages: int, generator: torch.Generator
) -> torch.Tensor:
    """[count] logical pages of these lanes, each once, in no order; none is a dummy."""
    local = torch.arange(1, local_pages)[:, None] * world_size
    pages = (local + torch.tensor(lanes)[None]).flatten()
    return pages[torch.randperm(len(pages), generator=generator)[:count]]
