"""The k best keys of each row, and a judge of anybody's choice (law A2).

Row 0 sees two keys and takes both, whatever their logits. Row 1 sees four; either of two equal ones will do.

>>> logits = torch.tensor([[5.0, 7.0, 9.0, 9.0], [4.0, 1.0, 1.0, 6.0]])
>>> ranges = KeyRanges(torch.tensor([0, 0]), torch.tensor([2, 4]), num_keys=4)
>>> top_k(logits, ranges, 3)[0].tolist()
[0, 1, -1]
>>> for second in ([3, 2, 0], [0, 1, 3], [0, 1, 2]):
...     finding = check_top_k(torch.tensor([[0, 1, -1], second]), logits, ranges, 3)
...     print(finding and f"{finding.what}: {finding.expected}")
None
None
row 1 of top-k: no unchosen logit above a chosen one
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from refmodel.attention.ranges import KeyRanges
from refmodel.errors import Finding
from refmodel.layout.geometry import at_least

NO_KEY = -1  # behind the chosen keys of a row, up to width k


def lowest_at_finite(logits: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Logits in which −inf means absent and nothing else: what is there never ties with what is not."""
    return logits.clamp(min=torch.finfo(logits.dtype).min).masked_fill_(~present, -torch.inf)


def top_k(logits: torch.Tensor, ranges: KeyRanges, k: int) -> torch.Tensor:
    """logits [rows, keys] → chosen keys [rows, k] int64, counted from each row's ks (A2).

    A row with L ≤ k keys gets 0 … L − 1 in ascending order, its logits ignored; any other gets some k keys
    such that no unchosen logit is higher. −1 stands behind them. What is outside [ks, ke) is ignored,
    NaN or not. ``k`` ≥ 1 may exceed the number of keys.
    """
    at_least(1, k, "k of top-k")
    ranges.require(len(logits), logits.shape[1], "top-k")
    width = min(k, logits.shape[1])
    best = lowest_at_finite(logits, ranges.visible()).topk(width, dim=1).indices - ranges.ks[:, None]
    order, lengths = torch.arange(width, device=logits.device), ranges.lengths[:, None]
    chosen = torch.where(lengths <= k, order, best)
    return pad(torch.where(order < lengths, chosen, NO_KEY), (0, k - width), value=NO_KEY)


def check_top_k(
    chosen: torch.Tensor, logits: torch.Tensor, ranges: KeyRanges, k: int, *, slack: float = 0.0
) -> Finding | None:
    """The first fault of a choice [rows, k], counted from ks, under A2; None if there is none.

    Chosen are sets above a threshold, so ties are free and lists are never compared. ``slack`` is what an
    unchosen logit may exceed a chosen one by: the error of the logits by which somebody else chose.
    """
    ranges.require(len(logits), logits.shape[1], "top-k")
    if chosen.shape != (len(ranges), k):
        return Finding("A2", "shape of top-k", f"[{len(ranges)}, {k}]", f"{list(chosen.shape)}")
    for expected, broken in _faults(chosen, logits, ranges, k, slack):
        if bool(broken.any()):
            row = int(broken.int().argmax())
            return Finding("A2", f"row {row} of top-k", expected, str(chosen[row].tolist()))
    return None


def _faults(
    chosen: torch.Tensor, logits: torch.Tensor, ranges: KeyRanges, k: int, slack: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """What is expected, and [rows] where it is not so. A later test relies on the earlier ones."""
    lengths, order = ranges.lengths[:, None], torch.arange(k, device=chosen.device)
    wanted = order < lengths
    outside = (chosen < 0) | (chosen >= lengths)
    yield "min(L, k) keys of its own range", (wanted & outside).any(1)
    yield "−1 behind the chosen keys", (~wanted & (chosen != NO_KEY)).any(1)
    ordered = chosen.sort(1).values
    yield "each key once", ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
    is_short = lengths <= k
    yield "all of its keys in ascending order", (is_short & wanted & (chosen != order)).any(1)
    lowest, highest = _threshold(chosen, logits, ranges)
    # Not `highest > lowest`: NaN is above nothing, and must not pass.
    yield "no unchosen logit above a chosen one", ~is_short[:, 0] & ~(highest <= lowest + slack)


def _threshold(
    chosen: torch.Tensor, logits: torch.Tensor, ranges: KeyRanges
) -> tuple[torch.Tensor, torch.Tensor]:
    """([rows] lowest chosen logit, [rows] highest of the visible ones that were not chosen)."""
    nowhere = logits.shape[1]  # one column more, for the −1
    columns = torch.where(chosen == NO_KEY, nowhere, chosen + ranges.ks[:, None])
    is_chosen = torch.zeros(logits.shape[0], nowhere + 1, dtype=torch.bool, device=logits.device)
    is_chosen = is_chosen.scatter_(1, columns, True)[:, :nowhere]
    lowest = pad(logits.masked_fill(~is_chosen, torch.inf), (0, 1), value=torch.inf).amin(1)
    unchosen = logits.masked_fill(is_chosen | ~ranges.visible(), -torch.inf)
    return lowest, pad(unchosen, (0, 1), value=-torch.inf).amax(1)
