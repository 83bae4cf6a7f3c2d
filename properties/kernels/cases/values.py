"""What cases fill tensors with."""

from __future__ import annotations

from types import MappingProxyType

import torch
from hypothesis import strategies as st

TYPES = MappingProxyType({"bf16": torch.bfloat16, "f32": torch.float32, "uint8": torch.uint8})
POISON = 0xFF  # a byte of which all are: NaN in floats, −1 in integers
SEEDS = st.integers(0, 2**16)
PAGE_SIZES = st.sampled_from([2, 1, 3, 16, 64])

_PERIOD = 65_537  # bytes; a prime, so that rows and pages differ from their neighbours


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Finite numbers of any dtype, or any bytes."""
    if dtype is torch.uint8:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return torch.randn(shape, generator=generator).to(dtype)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What must never be read."""
    tensor = torch.empty(shape, dtype=dtype)
    tensor.view(torch.uint8).fill_(POISON)
    return tensor


def stale(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """What must survive: numbers that differ from row to row, also where there are gigabytes of them."""
    count = torch.Size(shape).numel()
    once = drawn((min(count, _PERIOD),), dtype, generator)
    if not count:
        return once.view(shape)
    return once.repeat(-(-count // len(once)))[:count].view(shape)


def scrambled_pages(
    count: int, lanes: range, world_size: int, local_pages: int, generator: torch.Generator
) -> torch.Tensor:
    """[count] logical pages of these lanes, each once, in no order; none is a dummy."""
    local = torch.arange(1, local_pages)[:, None] * world_size
    pages = (local + torch.tensor(lanes)[None]).flatten()
    return pages[torch.randperm(len(pages), generator=generator)[:count]]
