"""Is anything waiting for the GPU? (law S7)"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def nothing_waits(group: dist.ProcessGroup) -> Iterator[None]:
    """Within the block, waiting for the GPU is an error on all ranks of this process; without one, nothing.

    Barriers stand around it, since the mode belongs to the process, and ranks of lockstep share theirs.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier(group)
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("error")
    dist.barrier(group)
    try:
        yield
        dist.barrier(group)
    finally:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
