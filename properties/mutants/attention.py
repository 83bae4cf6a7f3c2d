"""Wrong scores, choices and merges over a right view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import torch

from properties.mutants.mutant import Right, mutant
from refmodel import oracle
from refmodel.attention import indexer, merge, sharded, sparse, topk, transform
from refmodel.attention.accumulating import accumulating_type
from refmodel.attention.ranges import KeyRanges
from refmodel.attention.sharded import LocalKeys
from refmodel.attention.sparse import Attended, Chosen
from refmodel.attention.topk import NO_KEY
from refmodel.attention.transform import Addressing, Transform
from refmodel.errors import Finding
from refmodel.oracle import Floats, Ints

# -- the indexer -------------------------------------------------------------------------------------------


@mutant(indexer.mqa_logits, "relu-after-the-sum", "A1")
def relu_of_the_sum(
    right: Right,
    q: torch.Tensor,
    keys: torch.Tensor,
    scale: torch.Tensor | None,
    weights: torch.Tensor,
    ranges: KeyRanges,
) -> torch.Tensor:
    """Heads are summed first and the negative part is cut from the sum, not from each head."""
    dtype = accumulating_type(q, keys)
    weighed = torch.einsum("mh,mhd->md", weights.to(dtype), q.to(dtype))[:, None]
    return right(weighed, keys, scale, torch.ones_like(weighed[..., 0]), ranges)


@mutant(indexer.mqa_logits, "scale-forgotten", "A1")
def keys_without_their_scale(
    right: Right,
    q: torch.Tensor,
    keys: torch.Tensor,
    scale: torch.Tensor | None,
    weights: torch.Tensor,
    ranges: KeyRanges,
) -> torch.Tensor:
    """Quantized index keys are used as they are stored, without the scale of each."""
    return right(q, keys, None, weights, ranges)


@mutant(indexer.mqa_logits, "ks-taken-for-zero", "A1")
def every_range_starts_at_zero(
    right: Right,
    q: torch.Tensor,
    keys: torch.Tensor,
    scale: torch.Tensor | None,
    weights: torch.Tensor,
    ranges: KeyRanges,
) -> torch.Tensor:
    """Keys are scored from the first of the request, but counted from the first of the batch."""
    columns = torch.arange(len(keys)) + ranges.ks[:, None]
    logits = right(q, keys, scale, weights, ranges)
    shifted = logits.gather(1, columns.clamp(max=len(keys) - 1)) if len(keys) else logits
    return shifted.masked_fill(columns >= ranges.ke[:, None], torch.nan)


# -- top-k -------------------------------------------------------------------------------------------------


@mutant(oracle.worst_top_k_fault, "topk-01", "A2", source="reported in aiter#4376")
def ties_are_errors(
    right: Right, chosen: Ints, logits: Floats, lengths: Ints, k: int, slack: float | Floats = 0.0
) -> str | None:
    """The choice of a long row is compared with another's list: a tie broken otherwise is an error."""
    visible = np.arange(logits.shape[1]) < lengths[:, None]
    another = np.argsort(np.where(visible, -logits, np.inf), axis=1, kind="stable")[:, :k]
    differs = (lengths > k) & (chosen[:, : another.shape[1]] != another).any(1)
    fault = f"row {differs.argmax()}: not the list of another" if differs.any() else None
    return right(chosen, logits, lengths, k, slack) or fault


@mutant(topk.check_top_k, "lists-compared", "A2", source="reported in aiter#4376")
def another_order_is_an_error(
    right: Right,
    chosen: torch.Tensor,
    logits: torch.Tensor,
    ranges: KeyRanges,
    k: int,
    *,
    slack: float = 0.0,
) -> Finding | None:
    """A choice is compared with another's list: another order is an error, or a tie broken otherwise."""
    expected = topk.top_k(logits, ranges, k)
    if torch.equal(chosen, expected):
        return None
    return Finding("A2", "top-k", str(expected.tolist()), str(chosen.tolist()))


@mutant(topk.check_top_k, "numbers-of-keys-compared", "A2", source="reported in aiter#4376")
def equal_when_as_many(
    right: Right,
    chosen: torch.Tensor,
    logits: torch.Tensor,
    ranges: KeyRanges,
    k: int,
    *,
    slack: float = 0.0,
) -> Finding | None:
    """Long rows pass with any k keys: whatever differs is taken for a tie."""
    return right(chosen, logits, ranges, k, slack=torch.inf)


@mutant(topk.top_k, "topk-02", "A2", source="reported in sglang#30512")
def ties_beyond_1024_lost(right: Right, logits: torch.Tensor, ranges: KeyRanges, k: int) -> torch.Tensor:
    """At the threshold only 1,024 candidates with equal logits are kept."""
    chosen = right(logits, ranges, k)
    if not logits.shape[1]:
        return chosen
    columns = (chosen + ranges.ks[:, None]).clamp(0, logits.shape[1] - 1)
    values = logits.gather(1, columns)
    ties = (values == values.amin(1, keepdim=True)) & (ranges.lengths > k)[:, None]
    return chosen.masked_fill(ties & (ties.cumsum(1) > 1024), NO_KEY)


@mutant(topk.top_k, "topk-03", "A2", source="reported in Automodel#3035")
def no_padding_to_the_width(right: Right, logits: torch.Tensor, ranges: KeyRanges, k: int) -> torch.Tensor:
    """With fewer keys than k the result is as wide as there are keys."""
    return right(logits, ranges, k)[:, : logits.shape[1]]


@mutant(topk.top_k, "ke-inclusive", "A2")
def one_key_too_many(right: Right, logits: torch.Tensor, ranges: KeyRanges, k: int) -> torch.Tensor:
    """The key at ke, which a row must not see, can be chosen."""
    ke = (ranges.ke + 1).clamp(max=ranges.num_keys)
    return right(logits, KeyRanges(ranges.ks, ke, ranges.num_keys), k)


@mutant(topk.top_k, "short-rows-by-logit", "A2")
def short_rows_sorted_by_logit(right: Right, logits: torch.Tensor, ranges: KeyRanges, k: int) -> torch.Tensor:
    """A row with no more than k keys gets them best first, not in ascending order."""
    chosen = right(logits, ranges, k)
    present = chosen != NO_KEY
    if not logits.shape[1]:
        return chosen
    columns = torch.where(present, chosen + ranges.ks[:, None], 0)
    values = logits.gather(1, columns).masked_fill(~present, -torch.inf)
    return chosen.gather(1, values.argsort(dim=1, descending=True, stable=True))


@mutant(topk.lowest_at_finite, "stale-logits-chosen", "A2")
def undefined_logits_can_be_chosen(logits: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """What lies outside [ks, ke), undefined after the kernel, takes part in the choice."""
    return logits


# -- the transform -----------------------------------------------------------------------------------------


@mutant(Addressing.transform, "topk-04", "A3", source="derived from the fork's history")
def offsets_built_for_paged(
    right: Right, self: Addressing, positions: torch.Tensor, into: Transform
) -> torch.Tensor:
    """The offsets of RAGGED are built for PAGED, too, which has no use for them."""
    assert self.row_starts is not None
    return right(self, positions, into)


@mutant(Addressing.row_starts, "offset-zero-for-all", "A3")
def one_segment_assumed(self: Addressing) -> torch.Tensor:
    """The zero vector, right for one request, serves for a batch of several."""
    return torch.zeros(self.num_rows, dtype=torch.int64)


@mutant(transform.to_slots, "first-table-for-all", "A3")
def rows_of_the_first_request(
    right: Right,
    positions: torch.Tensor,
    tables: Sequence[torch.Tensor],
    page_size: int,
    cu_seqlens_q: Sequence[int],
) -> torch.Tensor:
    """Every row is looked up in the page table of the first request, or beyond it."""
    return right(positions, [torch.cat(list(tables))] * len(tables), page_size, cu_seqlens_q)


# -- attention over chosen rows ----------------------------------------------------------------------------


@mutant(sparse.sparse_mla, "causal-off-by-one", "A4", "A5")
def one_key_too_few(
    right: Right, q: torch.Tensor, kv: torch.Tensor, chosen: Chosen, **options: Any
) -> Attended:
    """A row does not attend to the newest of its keys, unless it would attend to nothing."""
    several = (chosen.rows != NO_KEY).sum(1, keepdim=True) > 1
    newest = chosen.rows == chosen.rows.amax(1, keepdim=True)
    return right(q, kv, replace(chosen, rows=chosen.rows.masked_fill(several & newest, NO_KEY)), **options)


@mutant(sparse.sparse_mla, "value-from-the-wrong-end", "A4", "A5")
def value_includes_rope(
    right: Right, q: torch.Tensor, kv: torch.Tensor, chosen: Chosen, **options: Any
) -> Attended:
    """The value is the last dims of the row instead of the latent part."""
    rope = kv.shape[1] - options["latent"]
    return right(q.roll(-rope, -1), kv.roll(-rope, -1), chosen, **options)


@mutant(sparse.sparse_mla, "attn-03", "A4", "A6", source="reported in flash-attention#978")
def no_keys_lse_plus_infinity(
    right: Right, q: torch.Tensor, kv: torch.Tensor, chosen: Chosen, **options: Any
) -> Attended:
    """A row without keys has lse +inf instead of −inf."""
    attended = right(q, kv, chosen, **options)
    return replace(attended, lse=attended.lse.masked_fill(attended.lse == -torch.inf, torch.inf))


@mutant(sparse.sparse_mla, "lse-in-base-two", "A4")
def binary_logarithm(
    right: Right, q: torch.Tensor, kv: torch.Tensor, chosen: Chosen, **options: Any
) -> Attended:
    """lse is a logarithm to base 2, as kernels that compute with exp2 have it."""
    attended = right(q, kv, chosen, **options)
    return replace(attended, lse=attended.lse / torch.tensor(2.0).log())


@mutant(sparse.sparse_mla, "minus-one-read", "A4")
def minus_one_is_the_last_row(
    right: Right, q: torch.Tensor, kv: torch.Tensor, chosen: Chosen, **options: Any
) -> Attended:
    """−1 is used as an index, and reads the last row of the KV."""
    return right(q, kv, replace(chosen, rows=chosen.rows % max(1, len(kv))), **options)


@mutant(sparse.sparse_mla, "masked-by-weight-only", "A4")
def absent_rows_are_read(
    right: Right, q: torch.Tensor, kv: torch.Tensor, chosen: Chosen, **options: Any
) -> Attended:
    """For −1 row 0 is read with a weight of 0: if that is NaN, so is the sum."""
    attended = right(q, kv, chosen, **options)
    if not len(kv):
        return attended
    read = (chosen.rows == NO_KEY).any(1)[:, None] * (0 * kv[0, : options["latent"]])
    return replace(attended, out=attended.out + read[:, None])


# -- parts of ranks ----------------------------------------------------------------------------------------


@mutant(sharded.attend_local, "attn-01", "A6", source="reported in vllm#38416")
def empty_shard_has_lse_zero(
    right: Right, q: torch.Tensor, keys: LocalKeys, chosen: torch.Tensor, **options: Any
) -> Attended:
    """An empty shard leaves lse 0, as if it had a key of score 0: no merge can tell."""
    attended = right(q, keys, chosen, **options)
    return attended if len(keys) else replace(attended, lse=torch.zeros_like(attended.lse))


@mutant(merge.merge_attended, "attn-02", "A6", source="reported in flashinfer#4051, vllm#39148")
def empty_states_give_nan(parts: Sequence[Attended]) -> Attended:
    """States are merged two at a time with weights exp(lse − max), so that two empty ones give NaN."""
    return reduce(_merged_by_the_maximum, parts)


def _merged_by_the_maximum(one: Attended, other: Attended) -> Attended:
    out, lse = torch.stack([one.out, other.out]), torch.stack([one.lse, other.lse])
    weights = (lse - lse.amax(0)).exp()
    total = weights.sum(0)
    return Attended((weights[..., None] * out).sum(0) / total[..., None], lse.amax(0) + total.log())


@mutant(sharded.attend_local, "attn-04", "A5", "A6", source="reported in ring-flash-attention#42")
def partial_outputs_rounded(
    right: Right, q: torch.Tensor, keys: LocalKeys, chosen: torch.Tensor, **options: Any
) -> Attended:
    """Each partial output is rounded to the type of the queries, so that the error grows with the ranks."""
    attended = right(q, keys, chosen, **options)
    return replace(attended, out=attended.out.to(q.dtype).to(attended.out.dtype))


@mutant(merge.merge_attended, "averaged-over-ranks", "A6")
def average_of_outputs(right: Right, parts: Sequence[Attended]) -> Attended:
    """Ranks with keys count alike, however much weight their keys have."""
    alike = [replace(part, lse=part.lse.where(part.lse == -torch.inf, 0)) for part in parts]
    return replace(right(parts), out=right(alike).out)


@mutant(sharded.local_candidates, "local-rows-merged", "A6")
def local_rows_merged_as_global(
    right: Right,
    index_q: torch.Tensor,
    index_weights: torch.Tensor,
    keys: LocalKeys,
    *rest: Any,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates are named by their place among the rank's own keys, not in the flattened K."""
    logits, found = right(index_q, index_weights, keys, *rest, **options)
    local = torch.searchsorted(keys.rows, found)
    return logits, torch.where(found == NO_KEY, NO_KEY, local)
