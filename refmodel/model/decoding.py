"""One request on one rank that has all its rows: what decode computes, which knows no CP (laws T5, A5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from refmodel.attention.ranges import key_ranges
from refmodel.errors import InvalidInput
from refmodel.model.attend import attend, choose_keys
from refmodel.model.forward import packed_rows
from refmodel.model.layer import embed, finish, project
from refmodel.model.model import Model
from refmodel.storage.pages import read_rows
from refmodel.storage.shard import Destinations
from refmodel.storage.traffic import Shards


def decode(model: Model, ids: torch.Tensor, slots: torch.Tensor, shards: Sequence[Shards]) -> torch.Tensor:
    """Hidden rows [new, hidden] of the last layer, of new tokens ``ids`` [new] int64 behind those in cache.

    ``slots`` [tokens], the new ones last: where each token of the request lies in ``shards``, one a layer, on
    their device. The rows of the new tokens are written there. :class:`InvalidInput`, before anything is
    written, unless there are slots for the ids and shards for the layers.
    """
    _check(model, ids, slots, shards)
    prefix, tokens = len(slots) - len(ids), len(slots)
    positions = torch.arange(prefix, tokens)
    ranges = key_ranges(torch.zeros_like(positions), positions + 1, tokens).to(model.device)
    to = Destinations(torch.arange(len(ids), device=slots.device), slots[prefix:])
    positions = positions.to(model.device)
    hidden = embed(ids.to(model.device), model.weights)
    for layer, shards_of_layer in zip(model.weights.layers, shards, strict=True):
        projected = project(hidden, positions, layer, model.shape)
        views = {}
        for cache, rows in packed_rows(projected.kv, projected.index_k, model).items():
            shard = shards_of_layer[cache]
            shard.write(to, rows.to(slots.device))
            views[cache] = read_rows(shard.pages, slots, shard.format).to(model.device)
        chosen = choose_keys(projected, views, ranges, model)
        out = attend(projected, views, chosen, model).out  # of one request positions are rows of the view
        hidden = finish(hidden, out, layer, model.shape)
    return hidden


def _check(model: Model, ids: torch.Tensor, slots: torch.Tensor, shards: Sequence[Shards]) -> None:
    if not 0 < len(ids) <= len(slots):
        raise InvalidInput("tokens to decode", expected=f"1 … {len(slots)}, the slots", received=len(ids))
    layers = len(model.weights.layers)
    if len(shards) != layers:
        raise InvalidInput("shards", expected=f"those of {layers} layers", received=len(shards))
