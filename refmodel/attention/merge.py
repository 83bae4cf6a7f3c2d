"""Parts that ranks computed over their own keys, merged into what all keys give (law A6).

Weights are in proportion to exp(lse): here 1 to 2, and nothing for the part without keys.

>>> outs, weights = [1.0, 4.0, 0.0], torch.tensor([1.0, 2.0, 0.0])
>>> parts = [Attended(torch.full((1, 1, 1), out), w.log().view(1, 1)) for out, w in zip(outs, weights)]
>>> merged = merge_attended(parts)
>>> round(merged.out.item(), 5), round(merged.lse.exp().item(), 5)
(3.0, 3.0)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from refmodel.attention.sparse import Attended
from refmodel.attention.topk import NO_KEY, lowest_at_finite
from refmodel.layout.geometry import at_least


def merge_attended(parts: Sequence[Attended]) -> Attended:
    """Attention over the keys of all parts, none of which share a key; of the same rows and heads (A6).

    A part with lse −inf contributes nothing, whatever its output. If all are, the result is 0 and lse −inf.
    """
    at_least(1, len(parts), "parts to merge")
    out, lse = torch.stack([part.out for part in parts]), torch.stack([part.lse for part in parts])
    is_empty = lse == -torch.inf
    # Masked, as of all-empty rows the weights are NaN; outputs too, as 0 × NaN is NaN.
    weights = torch.where(is_empty, 0, lse.softmax(0))
    out = torch.where(is_empty[..., None], 0, out)
    return Attended((weights[..., None] * out).sum(0), lse.logsumexp(0))


def merge_top_k(logits: torch.Tensor, keys: torch.Tensor, k: int) -> torch.Tensor:
    """The best k of all parts' candidates: logits, keys [parts, rows, n] → keys [rows, k] (A2, A6).

    ``keys`` are int64 rows of the flattened K, −1 for none, no key in two parts. If every part brings its
    best k, or all it has, the result is a top-k over all keys. It is in ascending order, −1 behind: short
    rows, which get all their keys, must be, and others may.
    """
    at_least(1, k, "k of top-k")
    keys = keys.movedim(0, 1).flatten(1)
    scores = lowest_at_finite(logits.movedim(0, 1).flatten(1), keys != NO_KEY)
    best = keys.gather(1, scores.topk(min(k, keys.shape[1]), dim=1).indices)
    last = torch.iinfo(best.dtype).max
    ordered = torch.where(best == NO_KEY, last, best).sort(1).values
    return pad(torch.where(ordered == last, NO_KEY, ordered), (0, max(0, k - keys.shape[1])), value=NO_KEY)
