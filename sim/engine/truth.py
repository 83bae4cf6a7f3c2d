"""The truth of a service: each request is its list of token ids, and its KV is a function of that list.

Nothing is cached, so nothing can be stale. The tag of position p is a hash of the tokens 0 … p, so two
requests with one beginning have equal rows there and nowhere else; whoever reads a row that is not its own
reads another tag.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from refmodel.storage.identity import Cache

Ids = npt.NDArray[np.uint64]

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_STEP = np.uint64(0x9E3779B97F4A7C15)


def _mixed(values: Ids) -> Ids:
    """splitmix64 (Steele, Lea, Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * _MIX[0]
    values = (values ^ (values >> np.uint64(27))) * _MIX[1]
    mixed: Ids = values ^ (values >> np.uint64(31))
    return mixed


def _times(number: int, factor: np.uint64) -> np.uint64:
    """Modulo 2**64, as arrays do it; of scalars numpy would warn."""
    product: np.uint64 = np.uint64(number * int(factor) % (1 << 64))
    return product


def fresh_ids(request: int, start: int, stop: int) -> Ids:
    """Token ids of positions [start, stop) that no other request has."""
    places = np.arange(start, stop, dtype=np.uint64)
    return _mixed(places * _STEP + _times(request + 1, _MIX[1]))


def block_ids(blocks: Sequence[int], block_tokens: int, stop: int) -> Ids:
    """The first token ids of blocks: a function of the number of the block and the place in it."""
    numbers = np.repeat(np.array(blocks, dtype=np.uint64), block_tokens)[:stop]
    places = np.arange(len(numbers), dtype=np.uint64) % np.uint64(block_tokens)
    return _mixed(_mixed(numbers + _STEP) + places * _STEP)


def prefix_hashes(ids: Ids) -> Ids:
    """[n] a hash of the first 1, 2, … ids, order and all."""
    places = np.arange(len(ids), dtype=np.uint64)
    return np.cumsum(_mixed(ids + places * _STEP), dtype=np.uint64)


def tags(hashes: Ids, layer: int, cache: Cache) -> torch.Tensor:
    """int64 [n] ≥ 0: what the ``tag`` format stores of positions with these hashes."""
    plane = _times(layer * len(Cache) + cache + 1, _STEP)
    return torch.from_numpy((_mixed(hashes + plane) >> np.uint64(1)).astype(np.int64))


def sampled_id(ids: Ids, hashes: Ids) -> Ids:
    """[n + 1] the ids and the one that follows: sampled from all of them, so the same for equal requests."""
    return np.concatenate([ids, _mixed(hashes[-1:] + _STEP)])
