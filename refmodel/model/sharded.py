"""A layer without a view: each rank attends to the keys it stores (law A6)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from refmodel.attention.ranges import KeyRanges
from refmodel.attention.sharded import LocalKeys, Queries, shard_aware_attention
from refmodel.attention.transform import positions_of_rows
from refmodel.model.attend import chunk_elements, indexer_inputs
from refmodel.model.batch import Batch
from refmodel.model.layer import Projected
from refmodel.model.model import Model
from refmodel.storage.identity import Cache
from refmodel.storage.pages import read_rows
from refmodel.storage.traffic import Shards


def attend_to_shards(
    projected: Projected,
    shards: Shards,
    batch: Batch,
    model: Model,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prev and next together: (out [rows, heads, latent], positions [rows, top_k] of the chosen keys)."""
    mine = {
        cache: read_rows(shard.pages, batch.passage.held.slots, shard.format).to(model.device)
        for cache, shard in shards.items()
    }
    index_q, index_keys, scale, weights = indexer_inputs(projected, mine, model)
    kv = model.formats[Cache.KV].unpack(mine[Cache.KV])
    ranges = _joined([half.ranges for half in batch.halves])
    result = shard_aware_attention(
        Queries(projected.q, index_q, weights, ranges),
        LocalKeys(batch.passage.held.rows.to(model.device), kv, index_keys, scale),
        batch.passage.plan.row_counts,
        model.shape.top_k,
        latent=model.shape.latent,
        sm_scale=model.shape.sm_scale,
        group=group,
        chunk_elements=chunk_elements(model),
    )
    return result.attended.out, positions_of_rows(result.chosen, ranges.ks)


def _joined(halves: list[KeyRanges]) -> KeyRanges:
    ks, ke = torch.cat([half.ks for half in halves]), torch.cat([half.ke for half in halves])
    return KeyRanges(ks, ke, halves[0].num_keys)
