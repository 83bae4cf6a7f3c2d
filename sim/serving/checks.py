"""What a rank compares while it serves: identities, bytes, and what lies in slots it must not touch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from refmodel.errors import Finding, Where
from refmodel.layout.ownership import to_physical
from refmodel.storage.formats import Format
from refmodel.storage.identity import PADDING_TAG, Cache, describe
from refmodel.storage.pages import words
from refmodel.storage.shard import Shard
from sim.cases.case import Case, Forward, Turn


def differing_rows(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Indices of packed rows whose bytes differ: NaN equals the same NaN, and nothing else."""
    return (words(actual) != words(expected)).any(1).nonzero().flatten()


def check_view(
    view: torch.Tensor, case: Case, forward: Forward, layer: int, cache: Cache, rank: int
) -> Iterator[Finding]:
    """V1: each valid token of each request, in position order, is who it should be."""
    truth = torch.cat([turn.tags(layer, cache) for turn in forward.turns])
    if len(view) != len(truth):
        where = Where(rank=rank, step=forward.step, layer=layer, cache=cache.name.lower())
        yield Finding("V1", "length of the view", f"{len(truth)} rows", f"{len(view)}", where)
        return
    wrong = differing_rows(view, case.formats[cache].encode(truth))
    if len(wrong):
        row = int(wrong[0])
        turn, position = _locate(forward, row)
        yield Finding(
            law="V1",
            what=f"{len(wrong)} of {len(truth)} rows of the view, first",
            expected=describe(int(truth[row]), case.names),
            received=_content(view[row], case.formats[cache], case),
            where=_place(case, forward, turn, position, layer, cache, rank),
        )


def check_bytes(
    view: torch.Tensor, whole: torch.Tensor, forward: Forward, layer: int, cache: Cache, rank: int
) -> Iterator[Finding]:
    """V1: the view and the replicated baseline are the same bytes."""
    if len(whole) != len(view) or len(differing_rows(view, whole)):
        where = Where(step=forward.step, rank=rank, layer=layer, cache=cache.name.lower())
        yield Finding("V1", "view against the replicated baseline", "equal bytes", "other bytes", where)


def _locate(forward: Forward, view_row: int) -> tuple[Turn, int]:
    for turn in forward.turns:
        if view_row < turn.extent.end:
            return turn, view_row
        view_row -= turn.extent.end
    raise AssertionError("a view row beyond the view")


def _place(
    case: Case, forward: Forward, turn: Turn, position: int, layer: int, cache: Cache, rank: int
) -> Where:
    return Where(
        step=forward.step,
        rank=rank,
        request=turn.name,
        layer=layer,
        cache=cache.name.lower(),
        page=int(turn.table.pages[position // case.grid.page_size]),
        slot=position % case.grid.page_size,
        position=position,
    )


def _content(packed: torch.Tensor, row_format: Format, case: Case) -> str:
    row = row_format.unpack(packed[None])[0]
    if row.dtype == torch.int64:
        return describe(int(row[0]), case.names)
    if bool(row.isnan().all()):
        return "NaN: poison or padding"
    head = ", ".join(f"{value:.4g}" for value in row[:3].tolist())
    return f"the row [{head}, …] (format tag says whose)"


def check_shard(
    shard: Shard, case: Case, layer: int, cache: Cache, truth: Callable[[Turn], torch.Tensor]
) -> Iterator[Finding]:
    """O3: the shard holds exactly the tokens it owns; every other slot is still poison.

    ``truth`` gives the packed rows of a request. The dummy page may hold padding rows (S9), and nothing else.
    """
    row_format = shard.format
    width = row_format.bytes_per_token
    expected = row_format.poison_bytes(shard.num_slots * width).view(-1, width)
    for turn in _last_turns(case):
        slots = turn.table.slots(torch.arange(turn.extent.end))
        physical = to_physical(slots, shard.rank, case.grid)
        mine = physical >= 0
        expected[physical[mine]] = truth(turn)[mine]
    P = case.grid.page_size
    rows = shard.rows.cpu()
    padding = row_format.encode(torch.full((P,), PADDING_TAG))
    is_padding = row_format.unpack(rows[:P]) == row_format.unpack(padding)
    is_padding |= row_format.unpack(rows[:P]).isnan() & row_format.unpack(padding).isnan()
    expected[:P] = torch.where(is_padding.all(1)[:, None], rows[:P], expected[:P])
    wrong = differing_rows(rows, expected)
    if len(wrong):
        slot = int(wrong[0])
        yield Finding(
            law="O3" if slot >= P else "S9",
            what=f"{len(wrong)} of {shard.num_slots} slots of a shard, first",
            expected=_content(expected[slot], row_format, case),
            received=_content(rows[slot], row_format, case),
            where=Where(
                rank=shard.rank,
                layer=layer,
                cache=cache.name.lower(),
                page=slot // P * case.grid.world_size + shard.rank,
                slot=slot % P,
            ),
        )


def _last_turns(case: Case) -> Iterator[Turn]:
    """Each request as its last forward left it."""
    last = {turn.name: turn for forward in case.forwards for turn in forward.turns}
    return iter(last.values())
