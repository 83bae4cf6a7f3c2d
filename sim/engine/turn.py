"""A request's part of a forward, before it happens."""

from __future__ import annotations

from dataclasses import dataclass

from refmodel.layout.geometry import Extent
from sim.engine.request import Request
from sim.engine.truth import Ids


@dataclass(frozen=True, slots=True)
class Turn:
    """Who extends by what. The request itself changes only when the forward is over."""

    name: str
    request: Request
    ids: Ids  # what its tokens will be
    hashes: Ids
    extent: Extent


@dataclass(frozen=True, slots=True)
class Copy:
    """A shared tail page, and the page that a request gets instead of it before it extends into it (L5)."""

    old: int
    new: int
