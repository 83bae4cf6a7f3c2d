"""Operations that choose keys: top-k with a transform of what was chosen, and its merge (laws A2, A3, A6).

Sets above a threshold are compared, never lists: ties are free. Both transforms are undone for it.

>>> logits = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
>>> ks, ke, table = torch.tensor([0, 1]), torch.tensor([1, 3]), torch.tensor([[7], [4]])
>>> TOPK_TRANSFORM_PAGED.reference(logits, ks, ke, 2, table, (0, 1, 2), 4)[0].tolist()
[[28, -1], [16, 17]]
>>> TOPK_TRANSFORM_RAGGED.reference(logits, ks, ke, 2, torch.tensor([0, 10]))[0].tolist()
[[0, -1], [10, 11]]
"""

from __future__ import annotations

import torch

from refmodel.attention.merge import merge_top_k
from refmodel.attention.ranges import KeyRanges
from refmodel.attention.topk import NO_KEY, check_top_k, top_k
from refmodel.attention.transform import positions_of_rows, positions_of_slots, to_rows, to_slots
from refmodel.errors import Finding
from refmodel.ops.attention import ranges_of
from refmodel.ops.op import Argument, Arguments, Cost, Kind, Op, Result, Results, Space

Ints = tuple[int, ...]

_LOGITS = Argument("logits", Kind.VALUES, "anything outside ks ≤ n < ke", "[m, n]", (torch.float32,))
_KS = Argument("ks", Kind.INDEX, "first key that a row sees", "[m]")
_KE = Argument("ke", Kind.INDEX, "behind the last one; ks = ke sees nothing", "[m]")
_K = Argument("k", Kind.INT, "keys to choose; a row with L ≤ k keys takes all, in ascending order")


def _judge_choice(
    arguments: Arguments, received: torch.Tensor, positions: torch.Tensor, what: str
) -> Finding | None:
    """``received`` [m, k], and the positions in its request that it stands for: negative for what is none."""
    unknown = ((positions < 0) & (received != NO_KEY)).any(1)
    if bool(unknown.any()):
        row = int(unknown.int().argmax())
        return Finding("A3", f"row {row} of top-k", what, str(received[row].tolist()))
    ranges = ranges_of(arguments["ks"], arguments["ke"], arguments["logits"].shape[1])
    return check_top_k(positions, arguments["logits"], ranges, arguments["k"])


def _cost_of_choice(
    logits: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor, k: int, index_bytes: int
) -> Cost:
    seen = int((ke - ks).sum())
    return Cost(seen * logits.dtype.itemsize + ks.nbytes + ke.nbytes + len(logits) * k * index_bytes)


# -- PAGED -------------------------------------------------------------------------------------------------


def _tables(page_table: torch.Tensor) -> list[torch.Tensor]:
    """Pages of each request; entries behind them are −1."""
    return [pages[pages >= 0] for pages in page_table.to(torch.int64)]


def _topk_transform_paged(
    logits: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    k: int,
    page_table: torch.Tensor,
    cu_seqlens_q: Ints,
    page_size: int,
) -> Results:
    chosen = top_k(logits, ranges_of(ks, ke, logits.shape[1]), k)
    return (to_slots(chosen, _tables(page_table), page_size, cu_seqlens_q).to(page_table.dtype),)


def _judge_slots(arguments: Arguments, received: Results, expected: Results) -> Finding | None:
    slots = received[0].to(torch.int64)
    positions = positions_of_slots(
        slots, _tables(arguments["page_table"]), arguments["page_size"], arguments["cu_seqlens_q"]
    )
    return _judge_choice(arguments, slots, positions, "slots of pages of its own request, or −1")


TOPK_TRANSFORM_PAGED = Op(
    name="topk_transform_paged",
    meaning="The k best keys of each row, as logical slots.",
    arguments=(
        _LOGITS,
        _KS,
        _KE,
        _K,
        Argument("page_table", Kind.INDEX, "logical pages by position, −1 behind", "[requests, most pages]"),
        Argument(
            "cu_seqlens_q",
            Kind.INTS,
            "first row of each request; rows behind the last are padding",
            "[requests + 1]",
        ),
        Argument("page_size", Kind.INT, "P"),
    ),
    results=(Result("slots", "[m, k]", "of the type of page_table; −1 behind those chosen"),),
    reference=_topk_transform_paged,
    spaces=lambda logits, ks, ke, k, page_table, cu_seqlens_q, page_size: (
        Space((len(logits), k), page_table.dtype),
    ),
    judge=_judge_slots,
    compared="as sets above a threshold, ties free",
    laws=("A2", "A3", "S6", "S9"),
    cost=lambda logits, ks, ke, k, page_table, cu_seqlens_q, page_size: _cost_of_choice(
        logits, ks, ke, k, page_table.dtype.itemsize
    ),
)

# -- RAGGED ------------------------------------------------------------------------------------------------


def _topk_transform_ragged(
    logits: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor, k: int, row_starts: torch.Tensor
) -> Results:
    chosen = top_k(logits, ranges_of(ks, ke, logits.shape[1]), k)
    return (to_rows(chosen, row_starts.to(torch.int64)).to(row_starts.dtype),)


def _judge_rows(arguments: Arguments, received: Results, expected: Results) -> Finding | None:
    rows = received[0].to(torch.int64)
    positions = positions_of_rows(rows, arguments["row_starts"].to(torch.int64))
    return _judge_choice(arguments, rows, positions, "rows from row_starts on, or −1")


TOPK_TRANSFORM_RAGGED = Op(
    name="topk_transform_ragged",
    meaning="The k best keys of each row, as rows of the flattened K.",
    arguments=(
        _LOGITS,
        _KS,
        _KE,
        _K,
        Argument(
            "row_starts",
            Kind.INDEX,
            "row of the flattened K at which position 0 of a row's request is",
            "[m]",
        ),
    ),
    results=(Result("rows", "[m, k]", "of the type of row_starts; −1 behind those chosen"),),
    reference=_topk_transform_ragged,
    spaces=lambda logits, ks, ke, k, row_starts: (Space((len(logits), k), row_starts.dtype),),
    judge=_judge_rows,
    compared="as sets above a threshold, ties free",
    laws=("A2", "A3", "S6", "S9"),
    cost=lambda logits, ks, ke, k, row_starts: _cost_of_choice(logits, ks, ke, k, row_starts.dtype.itemsize),
)

# -- merge -------------------------------------------------------------------------------------------------


def _topk_merge(logits: torch.Tensor, keys: torch.Tensor, k: int) -> Results:
    return (merge_top_k(logits, keys.to(torch.int64), k).to(keys.dtype),)


def _judge_merged(arguments: Arguments, received: Results, expected: Results) -> Finding | None:
    """A2 over the candidates of a row in ascending order of keys: as if it saw them and no others."""
    keys = arguments["keys"].to(torch.int64).movedim(0, 1).flatten(1)
    logits = arguments["logits"].movedim(0, 1).flatten(1)
    none = torch.iinfo(torch.int64).max
    ordered, order = keys.where(keys != NO_KEY, none).contiguous().sort(1)
    lengths = (keys != NO_KEY).sum(1)
    merged = received[0].to(torch.int64)
    found = _places(ordered, merged)
    if bool((unknown := (found < NO_KEY).any(1)).any()):
        row = int(unknown.int().argmax())
        return Finding(
            "A6", f"row {row} of merged top-k", "candidates of a part, or −1", str(merged[row].tolist())
        )
    ranges = KeyRanges(torch.zeros_like(lengths), lengths, ordered.shape[1])
    return check_top_k(found, logits.gather(1, order), ranges, arguments["k"])


def _places(ordered: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[m, k] places of keys in ascending candidates [m, n]; −1 of −1, −2 of what is none of them."""
    if not ordered.shape[1]:
        return keys.clamp(max=0).where(keys == NO_KEY, NO_KEY - 1)
    place = torch.searchsorted(ordered, keys.contiguous()).clamp(max=ordered.shape[1] - 1)
    is_known = (ordered.gather(1, place) == keys) & (keys >= 0)
    return torch.where(keys == NO_KEY, NO_KEY, torch.where(is_known, place, NO_KEY - 1))


TOPK_MERGE = Op(
    name="topk_merge",
    meaning="The k best keys of each row, from the best of each part of the keys.",
    arguments=(
        Argument("logits", Kind.VALUES, "of the candidates", "[parts, m, n]", (torch.float32,)),
        Argument(
            "keys", Kind.INDEX, "rows of the flattened K, in no two parts; −1 for none", "[parts, m, n]"
        ),
        _K,
    ),
    results=(Result("merged", "[m, k]", "of the type of keys; −1 behind those chosen"),),
    reference=_topk_merge,
    spaces=lambda logits, keys, k: (Space((logits.shape[1], k), keys.dtype),),
    judge=_judge_merged,
    compared="as sets above a threshold, ties free",
    laws=("A2", "A6"),
    cost=lambda logits, keys, k: Cost(
        logits.nbytes + keys.nbytes + logits.shape[1] * k * keys.dtype.itemsize
    ),
)
