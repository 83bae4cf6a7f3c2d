"""One forward of the model under context parallelism, as a rank program (laws A5, A7).

split → embed → a layer at a time (project local rows, exchange, choose, attend) → gather. All index work was
done before (:mod:`refmodel.storage.passage`, :mod:`refmodel.model.batch`), so nothing waits for the device
(S7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist

from refmodel.collectives import rank_and_size
from refmodel.errors import InvalidInput, Where
from refmodel.model.attend import attend, choose_rows
from refmodel.model.batch import Batch
from refmodel.model.layer import Projected, embed, finish, project
from refmodel.model.model import Model
from refmodel.model.sharded import attend_to_shards
from refmodel.storage.identity import Cache
from refmodel.storage.passage import Passage, gather_rows
from refmodel.storage.reuse import ViewPath
from refmodel.storage.traffic import Shards, Traffic, nothing_loads


@dataclass(frozen=True, slots=True, eq=False)
class LayerTrace:
    """What one layer did on one rank, for whoever wants to compare."""

    rows: dict[Cache, torch.Tensor]  # packed, of this rank's rows
    views: dict[Cache, torch.Tensor]  # packed, of all keys; none where each rank attends to its shard
    positions: torch.Tensor  # [row_counts[rank], top_k] chosen keys of each row's request


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """A forward's result on every rank."""

    hidden: torch.Tensor  # [real rows, hidden] of the last layer, in batch order
    layers: tuple[LayerTrace, ...]


def forward(
    group: dist.ProcessGroup,
    model: Model,
    batch: Batch,
    shards: Sequence[Shards],
    *,
    ready: Callable[[int], None] = nothing_loads,
) -> Output:
    """Run all layers; ``shards`` are those of each layer. Rows are computed where the weights are.

    ``ready`` is called with a layer before anything of it is read: it returns when the layer is loaded (H4).
    :class:`InvalidInput`, before anything is written, for a batch of another rank or world, and unless there
    are shards for each layer.
    """
    _check(group, model, batch, shards)
    traffic = Traffic(batch.passage, tuple(shards), group, ready=ready)
    hidden = embed(batch.ids, model.weights)
    traces = []
    for index, layer in enumerate(model.weights.layers):
        projected = project(hidden, batch.positions, layer, model.shape)
        rows = packed_rows(projected.kv, projected.index_k, model)
        device = next(iter(shards[index].values())).pages.device
        views = traffic.views(index, {cache: packed.to(device) for cache, packed in rows.items()})
        views = {cache: view.to(model.device) for cache, view in views.items()}
        if batch.passage.read.path is ViewPath.NONE:
            out, positions = attend_to_shards(projected, shards[index], batch, model, group)
        else:
            out, positions = _attend_halves(projected, views, batch, model)
        hidden = finish(hidden, out, layer, model.shape)
        traces.append(LayerTrace(rows, views, positions))
    return Output(_gathered(hidden, batch.passage, group), tuple(traces))


def _check(group: dist.ProcessGroup, model: Model, batch: Batch, shards: Sequence[Shards]) -> None:
    here, its = rank_and_size(group), (batch.passage.rank, batch.passage.plan.grid.world_size)
    if here != its:
        raise InvalidInput(
            "rank and world of a batch",
            expected=f"{here}, as the group's",
            received=its,
            where=Where(rank=here[0]),
        )
    if len(shards) != len(model.weights.layers):
        raise InvalidInput(
            "shards", expected=f"those of {len(model.weights.layers)} layers", received=len(shards)
        )


def packed_rows(kv: torch.Tensor, index_k: torch.Tensor, model: Model) -> dict[Cache, torch.Tensor]:
    """What a layer stores of its rows."""
    return {Cache.KV: model.pack(Cache.KV, kv), Cache.INDEX: model.pack(Cache.INDEX, index_k)}


def _attend_halves(
    projected: Projected, views: dict[Cache, torch.Tensor], batch: Batch, model: Model
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prev and next by themselves, over the same views (V8); their rows together again."""
    outs, chosen = [], []
    for part, half in zip(_cut(projected, batch.passage), batch.halves, strict=True):
        positions, view_rows = choose_rows(part, views, half, batch.compact, model)
        outs.append(attend(part, views, view_rows, model).out)
        chosen.append(positions)
    return torch.cat(outs), torch.cat(chosen)


def _cut(projected: Projected, passage: Passage) -> tuple[Projected, Projected]:
    """The queries of prev and of next (S5)."""
    pairs = {
        field.name: passage.plan.cut(getattr(projected, field.name), passage.rank)
        for field in fields(Projected)
    }
    prev, following = ({name: pair[which] for name, pair in pairs.items()} for which in (0, 1))
    return Projected(**prev), Projected(**following)


def _gathered(hidden: torch.Tensor, passage: Passage, group: dist.ProcessGroup) -> torch.Tensor:
    sent = hidden.to(passage.places.device)
    batch = gather_rows(sent, passage, group=group, site="hidden.out")
    return batch[: passage.plan.real_rows].to(hidden.device)
