"""The rows of one forward on one rank: who they are and what they may see (laws S5, S6, S7).

Everything comes from the plan, on the CPU, before the forward: from then on nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from refmodel.attention.ranges import KeyRanges, key_ranges
from refmodel.attention.transform import Addressing, addressing
from refmodel.errors import InvalidInput
from refmodel.layout.plan import PADDING, Half
from refmodel.storage.passage import Passage
from refmodel.storage.view import CompactTable


@dataclass(frozen=True, slots=True, eq=False)
class HalfRows:
    """Prev or next of a rank's rows."""

    ranges: KeyRanges
    addressing: Addressing


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A rank's rows. Index tensors are on the device of the arithmetic."""

    passage: Passage  # whose rows they are
    ids: torch.Tensor  # [row_counts[rank]]; −1 for padding rows
    positions: torch.Tensor  # [row_counts[rank]] in their requests (S6); −1 for padding rows
    halves: tuple[HalfRows, ...]  # prev and next, whose rows follow each other
    compact: tuple[CompactTable, ...]  # of each request


def batch_rows(passage: Passage, ids: torch.Tensor, device: torch.device) -> Batch:
    """This rank's rows of ``ids`` [real rows] in batch order. Ids of another batch are refused."""
    plan = passage.plan
    if ids.shape != (plan.real_rows,):
        raise InvalidInput(
            "token ids of a batch",
            expected=f"[{plan.real_rows}], one for each new token of the plan",
            received=list(ids.shape),
            fix="Ids and plan must be of the same batch.",
        )
    padded = torch.cat([ids, torch.full((plan.padding,), PADDING)])
    requests = range(len(plan.extents))
    return Batch(
        passage=passage,
        ids=plan.take(padded, passage.rank).to(device),
        positions=plan.take(plan.positions, passage.rank).to(device),
        halves=tuple(_half_rows(passage, half, device) for half in plan.halves(passage.rank)),
        compact=tuple(passage.view.compact(request, device) for request in requests),
    )


def _half_rows(passage: Passage, half: Half, device: torch.device) -> HalfRows:
    ks, ke = passage.plan.visibility(half.rows)
    ranges = key_ranges(ks, ke, passage.plan.key_starts[-1])
    return HalfRows(ranges.to(device), addressing(passage.plan, half, passage.view.tables, device=device))
