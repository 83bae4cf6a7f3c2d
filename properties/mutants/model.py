"""Wrong forwards: positions, key ranges and caches mixed up around right parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from properties.mutants.mutant import Right, mutant
from refmodel.attention.ranges import KeyRanges
from refmodel.layout.plan import PADDING, Half
from refmodel.model import attend, batch, forward, layer
from refmodel.model.batch import Batch, HalfRows
from refmodel.model.layer import Projected
from refmodel.model.model import Model
from refmodel.model.shape import ModelShape
from refmodel.model.weights import LayerWeights
from refmodel.storage.codecs import quantize
from refmodel.storage.identity import Cache
from refmodel.storage.passage import Passage
from refmodel.storage.traffic import Shards, Traffic

# -- positions and ranges ----------------------------------------------------------------------------------


@mutant(batch.batch_rows, "split-12", "S6", "A5", source="reported in sglang#28463, sglang#32098")
def positions_of_local_rows(right: Right, passage: Passage, ids: torch.Tensor, device: torch.device) -> Batch:
    """Rotary phases count the local rows of the rank, not the positions of their requests."""
    rows = right(passage, ids, device)
    local = torch.arange(len(rows.positions))
    return replace(rows, positions=local.where(rows.positions != PADDING, PADDING))


@mutant(batch.batch_rows, "positions-through-the-batch", "S6", "A5")
def positions_of_batch_rows(right: Right, passage: Passage, ids: torch.Tensor, device: torch.device) -> Batch:
    """Positions run on through the batch: right for its first request, if that has no prefix."""
    rows, plan = right(passage, ids, device), passage.plan
    through = plan.take(torch.arange(plan.num_rows), passage.rank)
    return replace(rows, positions=through.where(rows.positions != PADDING, PADDING))


@mutant(batch._half_rows, "split-13", "S6", "A5", source="derived from sglang 0.5.18")
def prefix_added_by_the_indexer_too(
    right: Right, passage: Passage, half: Half, device: torch.device
) -> HalfRows:
    """The prefix is counted twice, in the plan and in the indexer: rows see up to so many keys too many."""
    prefixes = torch.tensor([extent.prefix for extent in passage.plan.extents] + [0])
    return _seeing_more(right(passage, half, device), passage, half, by=prefixes)


@mutant(batch._half_rows, "next-token-seen", "A7")
def one_token_ahead(right: Right, passage: Passage, half: Half, device: torch.device) -> HalfRows:
    """A row sees the token behind its own, where there is one."""
    ones = torch.ones(len(passage.plan.extents) + 1, dtype=torch.int64)
    return _seeing_more(right(passage, half, device), passage, half, by=ones)


def _seeing_more(rows: HalfRows, passage: Passage, half: Half, *, by: torch.Tensor) -> HalfRows:
    """Each row sees ``by`` [requests + 1] more keys of its own request, as far as there are any."""
    plan, ranges = passage.plan, rows.ranges
    ends = torch.tensor([*plan.key_starts[1:], 0])
    requests = plan.request_of_row[half.rows]  # −1, of padding, is the last entry
    ke = torch.minimum(ranges.ke + by[requests], ends[requests])
    return replace(rows, ranges=KeyRanges(ranges.ks, ke, ranges.num_keys))


@mutant(batch.batch_rows, "one-range-for-both-halves", "S5")
def ranges_of_prev_for_next(right: Right, passage: Passage, ids: torch.Tensor, device: torch.device) -> Batch:
    """Next is given the key ranges of prev, as far as they go: its rows see too few keys."""
    rows = right(passage, ids, device)
    prev, following = (half.ranges for half in rows.halves)
    ks, ke = following.ks.clone(), following.ke.clone()
    both = min(len(prev), len(following))
    ks[:both], ke[:both] = prev.ks[:both], prev.ke[:both]
    wrong = replace(rows.halves[1], ranges=KeyRanges(ks, ke, following.num_keys))
    return replace(rows, halves=(rows.halves[0], wrong))


# -- choices -----------------------------------------------------------------------------------------------


@mutant(attend.choose_keys, "first-token-unseen", "A7")
def first_token_never_chosen(right: Right, *args: Any) -> torch.Tensor:
    """The first token of a request is left out of every choice but its own row's."""
    chosen = right(*args)
    return chosen.masked_fill((chosen == 0) & (chosen > 0).any(1, keepdim=True), -1)


@mutant(attend.quantized_query, "query-scale-forgotten", "A1")
def elements_without_their_scale(q: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The query's own scales go nowhere: a quiet head counts as much as a loud one."""
    elements, _ = quantize(q)
    return elements.to(torch.float32), weights.to(torch.float32)


# -- a layer -----------------------------------------------------------------------------------------------


@mutant(ModelShape.sm_scale, "scale-from-the-row", "A5")
def scale_of_the_absorbed_width(self: ModelShape) -> float:
    """Scores are scaled by the width of a KV row, not by the dims of a head before absorption."""
    return float(self.width**-0.5)


@mutant(layer._kv_rows, "keys-rotated-twice", "A5")
def keys_rotated_when_projected_and_when_stored(
    right: Right, x: torch.Tensor, angles: torch.Tensor, weights: LayerWeights, shape: ModelShape
) -> torch.Tensor:
    """Keys are rotated twice, when they are projected and when they are stored; queries once."""
    return right(x, 2 * angles, weights, shape)


@mutant(layer.lookup, "padding-is-token-zero", "S9")
def padding_looked_up_as_zero(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Padding rows are embedded as token 0: what they leave in a cache looks like a real row."""
    return table[ids.clamp(min=0)]


# -- the forward -------------------------------------------------------------------------------------------


@mutant(Traffic.__init__, "one-index-cache-for-all-layers", "A5", "V1")
def index_of_the_first_layer(
    right: Right,
    self: Traffic,
    passage: Passage,
    layers: tuple[Shards, ...],
    group: dist.ProcessGroup,
    **options: Any,
) -> None:
    """All layers keep their index keys in the cache of the first: history is that of the last layer."""
    shared = tuple({**shards, Cache.INDEX: layers[0][Cache.INDEX]} for shards in layers)
    right(self, passage, shared, group, **options)


@mutant(forward._gathered, "hidden-in-rank-order", "A5")
def hidden_rows_in_rank_order(
    right: Right, hidden: torch.Tensor, passage: Passage, group: dist.ProcessGroup
) -> torch.Tensor:
    """The output is the gathered rows as they come, rank by rank: the zigzag is not undone."""
    return right(hidden, replace(passage, places=passage.places.sort().values), group)


@mutant(forward._attend_halves, "halves-come-back-swapped", "A5")
def next_before_prev(
    right: Right, projected: Projected, views: Any, rows: Batch, model: Model
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of next stand before those of prev, whose rows come first."""
    out, chosen = right(projected, views, rows, model)
    prev = len(rows.halves[0].ranges)
    return out.roll(-prev, 0), chosen.roll(-prev, 0)
