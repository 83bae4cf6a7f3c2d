"""Where the rows of a view come from (laws V3, V4, V5).

*Full*: write, then materialize everything. *Current-only*: without a prefix the gathered current rows are
the view. *Partial*: only history is materialized, and current rows are joined to it. As history does not
depend on the forward, that of the next layer can be on its way while this one computes (*prefetch*).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from refmodel.layout.geometry import Extent


class ViewPath(Enum):
    """What a view is made of."""

    FULL = "full"  # pages of all ranks, after the write
    CURRENT = "current"  # the gathered current rows; no materialize
    PARTIAL = "partial"  # pages of history, and the gathered current rows
    NONE = "none"  # there is none: each rank attends to what it stores (A6)


@dataclass(frozen=True, slots=True)
class Reading:
    """How views are asked for. ``prefetch`` begins the next layer's history before this layer attends."""

    path: ViewPath = ViewPath.FULL
    prefetch: bool = False


FULL = Reading()


@dataclass(frozen=True, slots=True)
class ReadVerdict:
    """How the views of a forward are made, the same on all ranks."""

    path: ViewPath
    prefetch: bool
    fallbacks: tuple[str, ...] = ()  # what was asked for and cannot be, each with its reason


def read_verdict(asked: Reading, extents: Sequence[Extent]) -> ReadVerdict:
    """From shared metadata alone, so that all ranks read alike (S8, V6).

    Partial reuse of a batch without any prefix is current-only reuse, with nothing to prefetch.
    """
    cached = next((i for i, extent in enumerate(extents) if extent.prefix), None)
    if asked.path in (ViewPath.FULL, ViewPath.NONE):
        reason = ("no prefetch: the next layer's current rows would have to be there already",)
        return ReadVerdict(asked.path, False, reason if asked.prefetch else ())
    if cached is None:
        return ReadVerdict(ViewPath.CURRENT, False)
    if asked.path is ViewPath.CURRENT:
        prefix = extents[cached].prefix
        reason = (f"full view on all ranks: request {cached} has a prefix of {prefix} tokens",)
        return ReadVerdict(ViewPath.FULL, False, reason)
    return ReadVerdict(ViewPath.PARTIAL, asked.prefetch)


def join_history(history: torch.Tensor, current: torch.Tensor, extents: Sequence[Extent]) -> torch.Tensor:
    """History rows [sum(prefix), …] and current rows in batch order [≥ sum(tokens), …] → view rows (V4).

    Both may lie in one page: the cut is at the token, not at the page.
    """
    pieces, cached, new = [], 0, 0
    for extent in extents:
        pieces += [history[cached : cached + extent.prefix], current[new : new + extent.tokens]]
        cached, new = cached + extent.prefix, new + extent.tokens
    return torch.cat(pieces)
