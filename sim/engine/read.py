"""Where a forward reads and writes on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from refmodel.errors import Finding
from refmodel.storage.traffic import Shards


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """The shards of a rank, and what to do on the way."""

    layers: tuple[Shards, ...]
    group: dist.ProcessGroup
    device: torch.device  # of the shards
    before_layer: Callable[[int], None]  # called before anything of a layer is read (H4)
    findings: list[Finding]  # to add to
