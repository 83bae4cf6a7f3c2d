"""What the index work of a million tokens on 64 ranks costs, against plain torch of the same size.

Seconds depend on the machine; ratios do not, much. The yardsticks are ``torch.arange`` for what makes an
index, and an index copy (``index_select``) for what moves rows by one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from refmodel.layout.geometry import Extent, Grid, num_pages
from refmodel.layout.ownership import PageTable, current_slots, to_physical
from refmodel.layout.plan import Plan, plan_batch
from refmodel.layout.split import Split
from refmodel.storage.formats import index_format
from refmodel.storage.view import ViewIndex, assemble, view_index, view_layout

TOKENS = 1_000_000
GRID = Grid(world_size=64, page_size=64)
WIDTH = 4  # float32 a row: enough to move, little enough that indices show
ROUNDS = 7

Act = Callable[[], object]

ROWS = torch.ones(TOKENS, WIDTH)
YARDSTICKS: dict[str, Act] = {
    "arange": partial(torch.arange, TOKENS),
    "index copy": partial(torch.index_select, ROWS, 0, torch.arange(TOKENS)),
}


@dataclass(frozen=True, slots=True)
class Ratio:
    """One piece of work beside its yardstick."""

    batch: str
    split: str  # "any" where it does not matter
    work: str
    yardstick: str
    seconds: float
    plain_seconds: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.plain_seconds


def batches() -> dict[str, list[Extent]]:
    """A million tokens as one request, and as a thousand."""
    return {"1 request": [Extent(0, TOKENS)], "1,000 requests": [Extent(0, TOKENS // 1000)] * 1000}


def tables_of(extents: list[Extent]) -> list[PageTable]:
    """Pages in the order of a fresh allocator; the dummy pages come first."""
    tables, first = [], GRID.world_size
    for extent in extents:
        pages = num_pages(extent.end, GRID.page_size)
        tables.append(PageTable(torch.arange(first, first + pages), GRID))
        first += pages
    return tables


def measurements() -> Iterator[Ratio]:
    """All of it, in the order of the table."""
    for batch, extents in batches().items():
        tables = tables_of(extents)
        for split in Split:
            for work, act, yardstick in work_of_split(plan_batch(extents, GRID, split), tables):
                yield Ratio(batch, split.value, work, yardstick, *best_of(act, YARDSTICKS[yardstick]))
        for work, act, yardstick in work_of_view(tables, [extent.end for extent in extents]):
            yield Ratio(batch, "any", work, yardstick, *best_of(act, YARDSTICKS[yardstick]))


def work_of_split(plan: Plan, tables: list[PageTable]) -> Iterator[tuple[str, Act, str]]:
    """What depends on the split: what it is, how to do it, its yardstick."""
    slots = current_slots(plan, tables)
    yield "plan: rows of all ranks", partial(_plan_anew, plan), "arange"
    yield "ks and ke of all rows", partial(plan.visibility, plan.gather_order), "arange"
    yield "slots of all rows", partial(current_slots, plan, tables), "arange"
    yield "remap on rank 0", partial(to_physical, slots, 0, GRID), "arange"
    buffers = torch.ones(GRID.world_size * plan.max_rank_rows, WIDTH)
    yield "rerange of all rows", partial(plan.rerange, buffers), "index copy"


def work_of_view(tables: list[PageTable], valid: list[int]) -> Iterator[tuple[str, Act, str]]:
    """What does not."""
    row_format = index_format("f32", WIDTH)
    index = _view_anew(tables, valid)
    most = max(index.layout.page_counts)
    shape = GRID.world_size * most, row_format.page_bytes(GRID.page_size)
    buffers = torch.zeros(shape, dtype=torch.uint8)
    yield "view: pages of all ranks", partial(_view_anew, tables, valid), "arange"
    yield "view: assemble", partial(assemble, buffers, index, row_format), "index copy"


def _plan_anew(plan: Plan) -> torch.Tensor:
    # A plan works its indices out once; a new one has none yet.
    return plan_batch(plan.extents, plan.grid, plan.split).gather_order


def _view_anew(tables: list[PageTable], valid: list[int]) -> ViewIndex:
    return view_index(view_layout(tables, valid, GRID), 0, local_pages=TOKENS)


def best_of(act: Act, plain: Act) -> tuple[float, float]:
    """The shortest time of each, in seconds; they take turns, as machines are noisy."""
    times = [(_timed(act), _timed(plain)) for _ in range(ROUNDS)]
    return min(mine for mine, _ in times), min(theirs for _, theirs in times)


def _timed(act: Act) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def _print(results: Iterable[Ratio]) -> None:
    """One line a piece of work, one column a split."""
    splits = [split.value for split in Split]
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in results:
        line = cells.setdefault((row.batch, row.work, row.yardstick), {})
        line[row.split] = f"{row.seconds * 1e3:.1f} ms, {row.ratio:.1f} ×"
    for batch in batches():
        table = Table(f"{TOKENS:,} tokens, {batch}", "plain", *(*splits, "any split"))
        for (of, work, yardstick), line in cells.items():
            if of == batch:
                table.add_row(work, yardstick, *(line.get(split, "") for split in (*splits, "any")))
        Console(width=max(Console().width, 130)).print(table)


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers there.")] = None,
) -> None:
    """Plan, remap, rerange and view of a million tokens at W = 64, P = 64, as ratios to plain torch."""
    torch.set_num_threads(1)
    results = list(measurements())
    _print(results)
    if json_file is not None:
        rows = [asdict(row) | {"ratio": row.ratio} for row in results]
        json_file.write_text(json.dumps({"torch": torch.__version__, "layout": rows}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
