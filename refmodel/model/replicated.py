"""The same model on one rank, without pages, plans or collectives: one request, all its tokens at once.

It is the low-precision twin that budgets come from (A5): the same arithmetic and the same rounding of what is
stored, over rows that never left their rank. It is also what fills a cache with a prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from refmodel.attention.ranges import KeyRanges, key_ranges
from refmodel.model.attend import attend, choose_keys
from refmodel.model.forward import LayerTrace, packed_rows
from refmodel.model.layer import Projected, embed, finish, project
from refmodel.model.model import Model


@dataclass(frozen=True, slots=True, eq=False)
class Replicated:
    """A request on one rank."""

    hidden: torch.Tensor  # [tokens, hidden] of the last layer
    layers: tuple[LayerTrace, ...]
    projected: tuple[Projected, ...]  # of each layer
    ranges: KeyRanges  # of its rows: row p sees 0 … p


def replicated(model: Model, ids: torch.Tensor) -> Replicated:
    """Run a request of ``ids`` [tokens] from position 0."""
    tokens = len(ids)
    positions = torch.arange(tokens, device=model.device)
    ranges = key_ranges(torch.zeros(tokens, dtype=torch.int64), torch.arange(1, tokens + 1), tokens)
    ranges = ranges.to(model.device)
    hidden, traces, queries = embed(ids.to(model.device), model.weights), [], []
    for layer in model.weights.layers:
        projected = project(hidden, positions, layer, model.shape)
        rows = packed_rows(projected.kv, projected.index_k, model)
        chosen = choose_keys(projected, rows, ranges, model)
        out = attend(projected, rows, chosen, model).out
        hidden = finish(hidden, out, layer, model.shape)
        traces.append(LayerTrace(rows, rows, chosen))
        queries.append(projected)
    return Replicated(hidden, tuple(traces), tuple(queries), ranges)
