"""Who a row is: the int64 identity that the ``tag`` format stores, and row contents derived from it.

Identity comes first among the ways to be wrong: a swap of two visible pages changes no attention output,
but it changes who is where. Bits, low to high: write 11, request 20, position 23, layer 7, cache 2.
Identities are >= 0; poison and padding are negative, so nothing can be mistaken for a token.

>>> unpack(int(pack(request=1, position=133, layer=0, cache=Cache.KV, write=12)))
Identity(request=1, position=133, layer=0, cache=<Cache.KV: 0>, write=12)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

import torch

from refmodel.errors import InvalidInput

POISON_TAG = -0x5555555555555556  # bytes 0xAA: a slot that nobody wrote
PADDING_TAG = -2  # a padding row of a batch (S9)
_FIELDS = (("write", 11), ("request", 20), ("position", 23), ("layer", 7), ("cache", 2))
_SHIFTS = dict(zip((name for name, _ in _FIELDS), (0, 11, 31, 54, 61), strict=True))


class Cache(IntEnum):
    """The caches that share one placement and one remap (O1), and the queries, which are never stored."""

    KV = 0
    INDEX = 1
    QUERY = 3


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a row is."""

    request: int  # < 2**20
    position: int  # < 2**23
    layer: int  # < 2**7
    cache: Cache
    write: int  # step that wrote it, < 2**11; 0 for what was in cache before the first step

    def describe(self, request: str) -> str:
        """In words, with the request's name."""
        cache = self.cache.name.lower()
        written = f"written by step {self.write}" if self.write else "in cache from the start"
        return f"token {self.position} of request {request} ({cache}, layer {self.layer}, {written})"


def pack(
    *,
    request: torch.Tensor | int,
    position: torch.Tensor | int,
    layer: int,
    cache: Cache,
    write: torch.Tensor | int,
) -> torch.Tensor:
    """Identities, int64, broadcast over the tensors given. :class:`InvalidInput` when a field overflows."""
    values = {"write": write, "request": request, "position": position, "layer": layer, "cache": int(cache)}
    packed = torch.zeros((), dtype=torch.int64)
    for name, bits in _FIELDS:
        field = torch.as_tensor(values[name], dtype=torch.int64)
        if field.numel() and (int(field.min()) < 0 or int(field.max()) >> bits):
            raise InvalidInput(
                f"{name} of an identity",
                expected=f"0 … {(1 << bits) - 1}",
                received=f"{int(field.min())} … {int(field.max())}",
            )
        packed = packed | (field << _SHIFTS[name])
    return packed


def unpack(tag: int) -> Identity | None:
    """The identity in a tag; None for poison, padding or any other negative value."""
    if tag < 0:
        return None
    parts = {name: tag >> _SHIFTS[name] & ((1 << bits) - 1) for name, bits in _FIELDS}
    return Identity(
        parts["request"], parts["position"], parts["layer"], Cache(parts["cache"]), parts["write"]
    )


def describe(tag: int, names: Mapping[int, str] = MappingProxyType({})) -> str:
    """What a tag says, in words, also for the values that are no identity.

    ``names`` of requests by number; a request without a name goes by its number.
    """
    if tag == POISON_TAG:
        return "poison: nobody wrote this slot"
    if tag == PADDING_TAG:
        return "a padding row of the batch"
    if tag == -1:
        return "padding of a gather buffer"
    try:
        identity = unpack(tag)
    except ValueError:  # a cache that does not exist
        identity = None
    if identity is None:
        return f"no identity ({tag:#x})"
    return identity.describe(names.get(identity.request, str(identity.request)))


def contents(tags: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Row contents [n, width] in [−1, 1), a pure function of identity: the same on every rank and world.

    splitmix64 (Steele, Lea, Flood 2014) of the tag and the column, by wrapping int64 arithmetic.
    """
    mixed = tags[:, None] * width + torch.arange(width, device=tags.device)
    for multiplier, shift in (
        (-0x61C8864680B583EB, 30),
        (-0x40A7B892E31B1A47, 27),
        (-0x6B2FB644ECCEEE15, 31),
    ):
        mixed = mixed * multiplier
        mixed = mixed ^ (mixed >> shift & ((1 << (64 - shift)) - 1))
    return (mixed >> 11).to(torch.float64).div(2**52).to(dtype)
