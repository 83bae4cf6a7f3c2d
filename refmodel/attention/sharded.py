"""Attention without a view: each rank scores and attends to its own keys, and results are merged (law A6).

In three parts twice over: *contribute* (candidates of all rows, of the rank's own keys) → *exchange* →
*assemble* (the choice), then *contribute* (partial outputs) → *exchange* → *assemble* (the outputs). No KV
travels: queries do, and results. Every rank issues the same collectives, keys and rows or not (V6).

>>> keys = local_keys(torch.tensor([1, 4]), torch.ones(2, 3), torch.tensor([[5.0], [7.0]]), None)
>>> one = torch.ones(1, 1, 1)
>>> ranges = KeyRanges(torch.tensor([0]), torch.tensor([4]), num_keys=6)
>>> local_candidates(one, one[0], keys, ranges, 2)
(tensor([[5., -inf]]), tensor([[ 1, -1]]))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from refmodel.attention.accumulating import accumulating_type
from refmodel.attention.chunks import row_chunks
from refmodel.attention.indexer import mqa_logits
from refmodel.attention.merge import merge_attended, merge_top_k
from refmodel.attention.ranges import KeyRanges
from refmodel.attention.sparse import Attended, Chosen, nothing_attended, sparse_mla
from refmodel.attention.topk import NO_KEY, top_k
from refmodel.collectives import all_gather_rows, device_of, gather_buffers, rank_and_size
from refmodel.errors import InvalidInput

_CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class LocalKeys:
    """The keys of a batch that one rank owns, none being normal. :func:`local_keys` makes and checks it."""

    rows: torch.Tensor  # [n] int64, rows of the flattened K, ascending
    kv: torch.Tensor  # [n, width]
    index_keys: torch.Tensor  # [n, dim]
    scale: torch.Tensor | None  # [n] of the index keys; None for 1

    def __len__(self) -> int:
        return self.rows.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class Queries:
    """Query rows of one rank, or gathered of all ranks; also their number may be 0."""

    q: torch.Tensor  # [rows, heads, width]
    index_q: torch.Tensor  # [rows, index_heads, dim]
    index_weights: torch.Tensor  # [rows, index_heads]
    ranges: KeyRanges


@dataclass(frozen=True, slots=True, eq=False)
class ShardAware:
    """What one rank's rows got, and from which keys."""

    attended: Attended
    chosen: torch.Tensor  # [rows, k] int64 rows of the flattened K, ascending, −1 behind


def local_keys(
    rows: torch.Tensor, kv: torch.Tensor, index_keys: torch.Tensor, scale: torch.Tensor | None
) -> LocalKeys:
    """:class:`LocalKeys`; :class:`InvalidInput` unless rows ascend and all parts have one length."""
    lengths = {len(part) for part in (rows, kv, index_keys, scale) if part is not None}
    if len(lengths) != 1:
        raise InvalidInput("keys of a rank", expected="as many of each part", received=sorted(lengths))
    if bool((rows.diff() <= 0).any()) or bool((rows < 0).any()):
        raise InvalidInput("rows of a rank's keys", expected="ascending from 0 on", received=rows.tolist())
    return LocalKeys(rows, kv, index_keys, scale)


def local_candidates(
    index_q: torch.Tensor,
    index_weights: torch.Tensor,
    keys: LocalKeys,
    ranges: KeyRanges,
    k: int,
    *,
    chunk_elements: int = _CHUNK_ELEMENTS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best k of a rank's own keys for each row: (logits [rows, k], rows of the flattened K [rows, k]).

    index_q [rows, heads, dim], index_weights [rows, heads]; ``ranges`` over the whole flattened K. −inf and
    −1 stand behind, or everywhere if the rank owns no key that the row sees. All that it sees are candidates
    if they are at most k, so that a row that is short on all ranks keeps all its keys (A2).
    """
    if not len(keys):  # by length: nothing in the data tells an empty shard (A6)
        dtype = accumulating_type(index_q, keys.index_keys)
        nothing = torch.full((len(index_q), k), -torch.inf, dtype=dtype, device=index_q.device)
        return nothing, torch.full((len(index_q), k), NO_KEY, device=index_q.device)
    # Local keys ascend, so what a row sees of them is a range, too.
    bounds = torch.searchsorted(keys.rows, torch.stack([ranges.ks, ranges.ke]))
    local = KeyRanges(bounds[0], bounds[1], len(keys))
    chunks = row_chunks(
        len(index_q), elements_a_row=index_q.shape[1] * len(keys), chunk_elements=chunk_elements
    )
    parts = [_candidates(index_q[i], index_weights[i], keys, local[i], k) for i in chunks]
    logits, found = zip(*parts, strict=True)
    return torch.cat(logits), torch.cat(found)


def _candidates(
    index_q: torch.Tensor, index_weights: torch.Tensor, keys: LocalKeys, local: KeyRanges, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = mqa_logits(index_q, keys.index_keys, keys.scale, index_weights, local)
    chosen = top_k(logits, local, k)
    present = chosen != NO_KEY
    columns = torch.where(present, chosen + local.ks[:, None], 0)
    return (
        torch.where(present, logits.gather(1, columns), -torch.inf),
        torch.where(present, keys.rows[columns], NO_KEY),
    )


def attend_local(
    q: torch.Tensor,
    keys: LocalKeys,
    chosen: torch.Tensor,
    *,
    latent: int,
    sm_scale: float,
    chunk_elements: int = _CHUNK_ELEMENTS,
) -> Attended:
    """Attention to those of the chosen keys that this rank owns; 0 and lse −inf where it owns none (A6).

    q [rows, heads, width]; ``chosen`` [rows, k] rows of the flattened K or −1.
    """
    if not len(keys):  # by length, as above: with lse 0 it would weigh as much as a key of score 0
        return nothing_attended(q, keys.kv, latent)
    found = torch.searchsorted(keys.rows, chosen).clamp(max=len(keys) - 1)
    mine = torch.where(keys.rows[found] == chosen, found, NO_KEY)
    local = Chosen(mine, len(keys))
    return sparse_mla(q, keys.kv, local, latent=latent, sm_scale=sm_scale, chunk_elements=chunk_elements)


def shard_aware_attention(
    queries: Queries,
    keys: LocalKeys,
    counts: Sequence[int],
    k: int,
    *,
    latent: int,
    sm_scale: float,
    group: dist.ProcessGroup,
    chunk_elements: int = _CHUNK_ELEMENTS,
) -> ShardAware:
    """What this rank's rows get from the keys of all ranks, of which each stays where it is (A6).

    ``counts`` [W]: rows of each rank, shared metadata. Types are the same on all ranks, which issue the same
    eight gathers, ``sharded.*``, also without rows or keys (V6).
    """
    rank, size = rank_and_size(group)
    everyone = _gather_queries(queries, counts, group)
    logits, found = local_candidates(
        everyone.index_q, everyone.index_weights, keys, everyone.ranges, k, chunk_elements=chunk_elements
    )
    logits = _of_all_ranks(logits, size, group, "sharded.candidate_logits")
    found = _of_all_ranks(found, size, group, "sharded.candidates")
    chosen = merge_top_k(logits, found, k)
    part = attend_local(
        everyone.q, keys, chosen, latent=latent, sm_scale=sm_scale, chunk_elements=chunk_elements
    )
    outs = _of_all_ranks(part.out, size, group, "sharded.out")
    lses = _of_all_ranks(part.lse, size, group, "sharded.lse")
    start = sum(counts[:rank])
    own = slice(start, start + counts[rank])
    parts = [Attended(out[own], lse[own]) for out, lse in zip(outs, lses, strict=True)]
    return ShardAware(merge_attended(parts), chosen[own])


def _gather_queries(queries: Queries, counts: Sequence[int], group: dist.ProcessGroup) -> Queries:
    """Query rows of rank 0, then of rank 1, …"""

    def gather(rows: torch.Tensor, name: str) -> torch.Tensor:
        sent = rows.to(device_of(group))  # they travel there, wherever the arithmetic is
        return all_gather_rows(sent, counts, group=group, site=f"sharded.{name}").to(rows.device)

    ranges = queries.ranges
    q, index_q = gather(queries.q, "q"), gather(queries.index_q, "index_q")
    weights = gather(queries.index_weights, "index_weights")
    ks, ke = gather(torch.stack([ranges.ks, ranges.ke], 1), "ranges").unbind(1)
    return Queries(q, index_q, weights, KeyRanges(ks, ke, ranges.num_keys))


def _of_all_ranks(part: torch.Tensor, size: int, group: dist.ProcessGroup, site: str) -> torch.Tensor:
    """part [rows, …], as many rows on each rank → [W, rows, …]."""
    buffers = gather_buffers(part.to(device_of(group)), [len(part)] * size, group=group, site=site)
    return buffers.view(size, *part.shape).to(part.device)
