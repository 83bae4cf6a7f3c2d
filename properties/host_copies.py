"""A small host cache of every kind of cache, and keys that have whole copies in it."""

from __future__ import annotations

from collections.abc import Sequence

from refmodel.serving.host_cache import HostCache
from refmodel.serving.host_moves import Fill

LAYERS = {"kv": 2, "index": 2, "draft_kv": 1, "draft_index": 1}
PARTS = tuple((cache, layer) for cache, layers in LAYERS.items() for layer in range(layers))


def host_of(world_size: int, pages_per_lane: int) -> HostCache:
    return HostCache(LAYERS, world_size=world_size, pages_per_lane=pages_per_lane)


def filled(host: HostCache, keys: Sequence[int], lanes: Sequence[int], now: int = 0) -> Fill:
    """Keys with whole host copies in those lanes."""
    fill = host.plan_prefetch(keys, lanes, now)
    for cache in LAYERS:
        host.arrived(fill, cache)
    assert host.close(fill) == ()
    return fill
