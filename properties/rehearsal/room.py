"""Whether lanes can give pages, counted from what nobody uses (law L3)."""

from __future__ import annotations

from collections import Counter

from properties.rehearsal.model import Model
from properties.rehearsal.outlook import Outlook


def room(model: Model, wanted: Counter[int], *, taken: bool, also_kept: int | None = None) -> Outlook:
    """Whether lanes can give these pages, those counted in that no lock keeps (L3).

    ``also_kept``: a page of a node that is locked first.
    """
    free = model.free_pages()
    short = [lane for lane, count in wanted.items() if count > free[lane]]
    if not short:
        return Outlook(free=tuple(n - taken * wanted[lane] for lane, n in enumerate(free)))
    cached = model.tree.by_lane(model.tree.contents)
    if any(wanted[lane] > free[lane] + cached[lane] for lane in short):
        return Outlook(refused=True, out_of_pages=True, free=free)  # nothing is evicted in vain
    loose = model.tree.by_lane(model.tree.loose(model.tree.nodes(), also_kept))
    refused = any(wanted[lane] > free[lane] + loose[lane] for lane in short)
    return Outlook(refused=refused, out_of_pages=refused, evicts=True)
