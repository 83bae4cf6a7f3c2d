"""What a run serves: the shared metadata of every forward, and the truth to compare with.

Every rank gets the same case. What a rank decides, it decides from this alone (S8).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from refmodel.layout.geometry import Extent, Grid
from refmodel.layout.ownership import PageTable
from refmodel.layout.plan import Plan, plan_batch
from refmodel.layout.split import Split
from refmodel.storage.formats import Format
from refmodel.storage.identity import Cache, pack
from refmodel.storage.reuse import FULL, Reading
from sim.cases.arithmetic import Arithmetic

DraftPlan = Literal["current", "missing", "stale"]  # that comes with a forward; stale: the one before's


@dataclass(frozen=True, slots=True)
class Origin:
    """Who wrote a span of a request's KV: positions [start, stop) came from ``request`` in step ``write``."""

    start: int
    stop: int
    request: int
    write: int  # 0: in cache before the first step

    def tags(self, layer: int, cache: Cache) -> torch.Tensor:
        """The identities of the span, [stop − start]."""
        positions = torch.arange(self.start, self.stop)
        return pack(request=self.request, position=positions, layer=layer, cache=cache, write=self.write)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One request's part of a forward."""

    name: str
    request: int  # number, as in identities
    extent: Extent
    rotation: int
    table: PageTable  # covers extent.end tokens
    origins: tuple[Origin, ...]  # of positions [0, extent.end), in order: the truth

    def tags(self, layer: int, cache: Cache) -> torch.Tensor:
        """The true identities of all valid tokens, [extent.end]."""
        return torch.cat([origin.tags(layer, cache) for origin in self.origins])


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """One forward pass as shared metadata."""

    step: int  # 1, 2, …: the write number of its rows
    turns: tuple[Turn, ...]
    padding: int = 0
    draft: DraftPlan = "current"

    def plan(self, grid: Grid, split: Split) -> Plan:
        """The plan: every rank computes it for itself."""
        return plan_batch(
            [turn.extent for turn in self.turns],
            grid,
            split,
            rotations=[turn.rotation for turn in self.turns],
            padding=self.padding,
        )

    @property
    def tables(self) -> tuple[PageTable, ...]:
        return tuple(turn.table for turn in self.turns)

    @property
    def valid(self) -> tuple[int, ...]:
        """Tokens of each request after the forward."""
        return tuple(turn.extent.end for turn in self.turns)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Forwards to run on a grid of ranks, and what to check on the way."""

    grid: Grid
    split: Split
    formats: Mapping[Cache, Format]  # of the caches each layer has, in order
    forwards: tuple[Forward, ...]
    local_pages: int  # of every rank's shards, dummy included
    layers: int = 1
    reading: Reading = FULL
    arithmetic: Arithmetic | None = None  # the model whose rows the caches hold; without it, identities
    checks: frozenset[str] = frozenset({"identity"})

    @property
    def caches(self) -> tuple[Cache, ...]:
        return tuple(self.formats)

    def planes(self) -> Iterator[tuple[int, Cache]]:
        """(layer, cache) in the order in which a forward visits them."""
        return ((layer, cache) for layer in range(self.layers) for cache in self.caches)

    @property
    def names(self) -> dict[int, str]:
        """Names of requests by the number in their identities."""
        return {turn.request: turn.name for forward in self.forwards for turn in forward.turns}

    def preloads(self) -> Iterator[tuple[PageTable, Origin]]:
        """What was in cache before the first step."""
        for forward in self.forwards:
            for turn in forward.turns:
                if turn.origins[0].write == 0 and turn.extent.prefix == turn.origins[0].stop:
                    yield turn.table, turn.origins[0]
