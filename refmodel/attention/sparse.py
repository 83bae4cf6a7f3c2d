"""Multi-head latent attention over chosen rows (law A4).

One latent row serves as key and value: score = q · kv × sm_scale over all dims, value = the latent part.
Two scores of 1 share the weight, and lse is 1 + log 2; a row without keys gives 0 and lse −inf.

>>> kv = torch.tensor([[1.0, 0.0], [3.0, -2.0], [torch.nan, torch.nan]])
>>> chosen = chosen_rows(torch.tensor([[0, -1, 1], [-1, -1, -1]]), num_keys=3)
>>> attended = sparse_mla(torch.ones(2, 1, 2), kv, chosen, latent=1, sm_scale=1.0)
>>> attended.out.flatten().tolist(), attended.lse.flatten().tolist()
([2.0, 0.0], [1.693..., -inf])
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from refmodel.attention.accumulating import accumulating_type
from refmodel.attention.chunks import row_chunks
from refmodel.attention.topk import NO_KEY
from refmodel.errors import InvalidInput


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """What rows got from the keys they attended to, in the accumulating type: it can still be merged."""

    out: torch.Tensor  # [rows, heads, latent]; 0 for a row without keys
    lse: torch.Tensor  # [rows, heads] natural logarithm of the sum of exponentials; −inf without keys


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """Rows of the flattened K that each query row attends to.

    :func:`chosen_rows` checks what comes from elsewhere. What ``top_k`` and a transform made is right by
    construction and goes in as it is, as a check would wait for the device (S7).
    """

    rows: torch.Tensor  # [rows, k] int64; −1, anywhere in a row, for none
    num_keys: int  # rows of the flattened K


def chosen_rows(rows: torch.Tensor, num_keys: int) -> Chosen:
    """``rows`` [rows, k] int64 of a flattened K of ``num_keys`` rows, −1 for none.

    :class:`InvalidInput` for an index below −1 or from ``num_keys`` on, and for a key twice in a row, which
    would weigh double.
    """
    outside = ((rows < NO_KEY) | (rows >= num_keys)).any(1)
    ordered = rows.sort(1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
    for expected, broken in ((f"−1 or 0 … {num_keys - 1}", outside), ("each key once", twice)):
        if bool(broken.any()):
            row = int(broken.int().argmax())
            raise InvalidInput(f"keys chosen by row {row}", expected=expected, received=rows[row].tolist())
    return Chosen(rows, num_keys)


def sparse_mla(
    q: torch.Tensor,
    kv: torch.Tensor,
    chosen: Chosen,
    *,
    latent: int,
    sm_scale: float,
    chunk_elements: int = 1 << 24,
) -> Attended:
    """q [rows, heads, width], kv [keys, width], width = latent + rope → :class:`Attended` (A4).

    Rows of ``kv`` that nobody chose may hold anything, NaN too. Gathered rows, [rows, k, width], hold at most
    ``chunk_elements`` elements at a time, or those of one row. :class:`InvalidInput` if sizes do not fit.
    """
    if (len(chosen.rows), chosen.num_keys) != (len(q), len(kv)):
        raise InvalidInput(
            "chosen keys",
            expected=f"{len(q)} rows over {len(kv)} keys",
            received=f"{len(chosen.rows)} rows over {chosen.num_keys} keys",
            fix="Cut q and its choices by the same segment lengths (S5).",
        )
    if not len(kv):
        return nothing_attended(q, kv, latent)
    elements = chosen.rows.shape[1] * kv.shape[1]
    parts = [
        _attend(q[rows], kv, chosen.rows[rows], latent, sm_scale)
        for rows in row_chunks(len(q), elements_a_row=elements, chunk_elements=chunk_elements)
    ]
    return Attended(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))


def nothing_attended(q: torch.Tensor, kv: torch.Tensor, latent: int) -> Attended:
    """The state of rows that had no keys: it contributes nothing to a merge."""
    dtype = accumulating_type(q, kv)
    out = torch.zeros(*q.shape[:2], latent, dtype=dtype, device=q.device)
    return Attended(out, torch.full(q.shape[:2], -torch.inf, dtype=dtype, device=q.device))


def _attend(q: torch.Tensor, kv: torch.Tensor, rows: torch.Tensor, latent: int, sm_scale: float) -> Attended:
    dtype = accumulating_type(q, kv)
    present = rows != NO_KEY
    keys = kv[rows.clamp(min=0)].to(dtype)
    # Row 0 stands in for the absent, and may hold NaN, which a weight of 0 would not remove.
    keys.masked_fill_(~present[..., None], 0)
    scores = torch.einsum("mhd,mkd->mhk", q.to(dtype), keys) * sm_scale
    scores = scores.masked_fill_(~present[:, None], -torch.inf)
    weights = torch.where(present[:, None], scores.softmax(-1), 0)  # without keys: 0, not NaN
    return Attended(torch.einsum("mhk,mkd->mhd", weights, keys[..., :latent]), scores.logsumexp(-1))
