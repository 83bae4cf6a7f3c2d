"""What one rank has to say after a case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from refmodel.errors import Finding
from refmodel.model.forward import Output
from refmodel.model.replicated import Replicated
from refmodel.storage.identity import Cache
from refmodel.storage.shard import Shard


@dataclass(frozen=True, slots=True, eq=False)
class RankReport:
    """What one rank found."""

    rank: int
    digest: str  # of every view and output, in order: equal on all ranks, worlds and runs
    findings: tuple[Finding, ...]
    fallbacks: int  # paths that were asked for and could not be taken
    rows_checked: int
    outputs: tuple[Output, ...]  # of each forward of a model
    cached: Mapping[int, Replicated]  # by request: a prefix that was in cache, as a model computes it
    shards: tuple[dict[Cache, Shard], ...]  # of each layer, at the end; of a model only
