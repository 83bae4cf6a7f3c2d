"""Order on a GPU: a kernel belongs behind what is queued on the current stream, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_CYCLES = 10_000_000  # some milliseconds


@contextmanager
def busy_stream(device: str) -> Iterator[None]:
    """Within the block the current stream is a new one, with work on it: all that is queued comes late.

    A kernel on another stream comes too early, and finds memory as it was. On a CPU all comes in order.
    """
    if device != "cuda":
        yield
        return
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(_CYCLES)
        yield
    torch.cuda.synchronize()
