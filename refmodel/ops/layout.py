"""Operations on rows, slots and pages: who has which (laws S1–S4, O1, O2, V2–V4, T2, H2, D1)."""

from __future__ import annotations

import torch

from refmodel.layout.geometry import Extent, Grid
from refmodel.layout.ownership import to_physical
from refmodel.layout.plan import Plan, plan_batch
from refmodel.layout.split import Split
from refmodel.ops.judges import equal_bytes
from refmodel.ops.op import Argument, Cost, Kind, Op, Result, Results, Space

Ints = tuple[int, ...]


def _plan(prefixes: Ints, tokens: Ints, world_size: int, page_size: int) -> Plan:
    extents = [Extent(prefix, count) for prefix, count in zip(prefixes, tokens, strict=True)]
    return plan_batch(extents, Grid(world_size, page_size), Split.PAGE_ALIGNED)


def _rerange(buffers: torch.Tensor, prefixes: Ints, tokens: Ints, world_size: int, page_size: int) -> Results:
    return (_plan(prefixes, tokens, world_size, page_size).rerange(buffers),)


RERANGE = Op(
    name="rerange",
    meaning="Rows as a gather of all ranks brings them, padded to the longest rank → batch order.",
    arguments=(
        Argument("buffers", Kind.VALUES, "of all ranks, each padded", "[world_size × most rows, width]"),
        Argument("prefixes", Kind.INTS, "tokens of each request in cache", "[requests]"),
        Argument("tokens", Kind.INTS, "new tokens of each request", "[requests]"),
        Argument("world_size", Kind.INT, "W"),
        Argument("page_size", Kind.INT, "P"),
    ),
    results=(Result("rows", "[sum(tokens), width]", "in batch order; padding never leaks"),),
    reference=_rerange,
    spaces=lambda buffers, prefixes, tokens, world_size, page_size: (
        Space((sum(tokens), *buffers.shape[1:]), buffers.dtype),
    ),
    judge=equal_bytes("S4"),
    compared="byte for byte",
    laws=("S1", "S3", "S4"),
    cost=lambda buffers, prefixes, tokens, world_size, page_size: Cost(
        2 * sum(tokens) * buffers[:1].nbytes,
    ),
)


def _logical_to_physical(slots: torch.Tensor, rank: int, world_size: int, page_size: int) -> Results:
    return (to_physical(slots, rank, Grid(world_size, page_size)),)


LOGICAL_TO_PHYSICAL = Op(
    name="logical_to_physical",
    meaning="Group-wide slots → slots of one rank's storage, −1 where another rank owns them.",
    arguments=(
        Argument("slots", Kind.INDEX, "logical; −1 for none", "[n]"),
        Argument("rank", Kind.INT, "whose storage"),
        Argument("world_size", Kind.INT, "W"),
        Argument("page_size", Kind.INT, "P"),
    ),
    results=(Result("physical", "[n]", "of the dtype of slots"),),
    reference=_logical_to_physical,
    spaces=lambda slots, rank, world_size, page_size: (Space(tuple(slots.shape), slots.dtype),),
    judge=equal_bytes("O2"),
    compared="byte for byte",
    laws=("O1", "O2"),
    cost=lambda slots, rank, world_size, page_size: Cost(2 * slots.nbytes),
)
