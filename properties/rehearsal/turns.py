"""What a forward or a decode must come to: who goes in, how far, with which pages (L2–L6, G1, G2, G4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from properties.rehearsal.model import Model
from properties.rehearsal.outlook import Outlook, Part
from properties.rehearsal.room import room
from refmodel.layout.geometry import Extent, coverage
from refmodel.layout.placement import page_lanes
from refmodel.layout.plan import plan_batch
from sim.engine.request import Phase, Request
from sim.engine.truth import prefix_hashes, sampled_id


def of_forward(model: Model, names: Sequence[str]) -> Outlook | None:
    """The next chunk of each, of the first so many that the caps admit. None if it must be refused."""
    if not _all_in(model, names, Phase.PREFILL):
        return None
    extents = [_next_chunk(model, model.running[name]) for name in names]
    budget = model.setting.max_tokens
    most = (model.setting.max_requests or len(names)) if model.setting.batch else 1
    while len(extents) > 1 and (
        len(extents) > most or (budget and sum(coverage(e.tokens, model.P) for e in extents) > budget)
    ):
        extents.pop()
    return _of_turns(model, names, extents)


def of_decode(model: Model, names: Sequence[str]) -> Outlook | None:
    """One token more for each, of those that were sent on decode (T5). None if it must be refused."""
    if not _all_in(model, names, Phase.READY) or any(map(model.transfers.is_under_way, names)):
        return None
    there = [name for name in names if model.transfers.is_there(name)]
    if not model.transfers.may_decode(there):
        return None
    here = [name for name in names if name not in there]
    outlook = Outlook(free=model.free_pages())
    if here:
        outlook = _of_turns(model, here, [Extent(model.running[name].valid, 1) for name in here])
    if outlook.refused:
        return outlook
    ends: dict[str, tuple[int, ...]] = {name: (model.transfers.sent[name].tokens + 1,) for name in there}
    return replace(outlook, valid=outlook.valid | ends)


def _all_in(model: Model, names: Sequence[str], phase: Phase) -> bool:
    waiting = model.names(phase)
    return bool(names) and len(set(names)) == len(names) and all(name in waiting for name in names)


def _next_chunk(model: Model, request: Request) -> Extent:
    """All that remains, or to the last page multiple within a chunk (G4)."""
    stop, most = len(request.ids), model.setting.chunk
    if most is not None and stop - request.valid > most:
        stop = max(end for end in range(request.valid + most + 1) if end % model.P == 0)
    return Extent(request.valid, stop - request.valid)


def _of_turns(model: Model, names: Sequence[str], extents: Sequence[Extent]) -> Outlook:
    parts = _parts(model, names, extents)
    wanted = Counter(lane for part in parts for lane in part.new_lanes)
    outlook = room(model, wanted, taken=True)
    if outlook.refused:
        return outlook
    ends: dict[str, tuple[int, ...]] = {name: (model.running[name].valid,) for name in names}
    ends |= {part.name: (part.extent.end,) for part in parts}
    copies = sum(bool(part.extent.prefix % model.P) and not part.keeps_head for part in parts)
    free = outlook.free and _with_duplicates(model, outlook.free, parts)
    return replace(outlook, valid=ends, free=free, copies=copies, parts=parts)


def _parts(model: Model, names: Sequence[str], extents: Sequence[Extent]) -> tuple[Part, ...]:
    requests = [model.running[name] for name in names[: len(extents)]]
    rotations = [request.rotation for request in requests]
    plan = plan_batch(extents, model.tables.grid, model.setting.split, rotations=rotations)
    return tuple(
        Part(
            name,
            extent,
            tuple(page_lanes(plan, i).tolist()),
            bool(extent.prefix % model.P) and request.pages[-1] not in model.tree.contents,
        )
        for i, (name, request, extent) in enumerate(zip(names, requests, extents, strict=False))
    )


def _with_duplicates(model: Model, free: tuple[int, ...], parts: Sequence[Part]) -> tuple[int, ...]:
    """Plus the pages that are freed at once, as the tree has others for the same tokens (L6)."""
    P, left, inserted = model.P, list(free), set[int]()
    overlap = model.tree.overlap
    for part in parts:
        request, head = model.running[part.name], part.extent.prefix // P
        first = max(0, part.extent.prefix - overlap) // P  # whole before, but for the next token's part in it
        hashes = request.hashes
        if part.extent.end > len(hashes):
            hashes = prefix_hashes(sampled_id(request.ids, hashes))
        ends: list[int] = hashes[P - 1 + overlap : part.extent.end : P].tolist()
        for position, end in enumerate(ends[first:], first):
            if end in model.tree.known or end in inserted:
                kept = position < head or (part.keeps_head and position == head)
                page = request.pages[position] if kept else part.lanes[position - head]
                if not kept or page not in model.tree.contents:
                    left[page % len(left)] += 1  # a lane is the owner of all its pages
        inserted.update(ends)
    return tuple(left)
