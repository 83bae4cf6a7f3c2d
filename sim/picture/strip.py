"""A forward drawn with text: the ownership strip of each request, then what each rank computes and sends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sim.picture.anatomy import Anatomy, Page, Piece, Rank, Strip

# One a rank, told apart on dark and on light; from rank 12 on they repeat, and the number tells.
COLOURS = (
    "blue", "green", "magenta", "dark_orange", "cyan", "red",
    "purple", "dark_olive_green3", "deep_pink3", "steel_blue", "gold3", "grey50",
)  # fmt: skip
_LABELS = ("position", "page", "owner", "computed", "rows", "from")
_LABEL_WIDTH = max(map(len, _LABELS)) + 1


def print_forward(forward: Anatomy, console: Console) -> None:
    """Draw one forward, no wider than the console."""
    title = f"step {forward.step}: {forward.split}, W = {forward.world_size}, P = {forward.page_size}"
    console.rule(Text(title, "bold"), align="left")
    for request in forward.requests:
        console.print(_heading(request), style="bold")
        for line in strip_lines(request.pages, forward.page_size, console.width):
            console.print(line, no_wrap=True)
        console.print()
    console.print(_verdict(forward))
    console.print(_ranks(forward))
    console.print()


def _heading(request: Strip) -> str:
    end = request.prefix + request.tokens
    rotation = f", rotation {request.rotation}" if request.rotation else ""
    return (
        f"request {request.request}: {_count(request.tokens, 'new token')} "
        f"[{request.prefix}:{end}), {_count(request.prefix, 'token')} in cache, "
        f"{_count(len(request.pages), 'page')}{rotation}"
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def strip_lines(pages: Sequence[Page], page_size: int, width: int) -> Iterator[Text]:
    """The strip as lines of at most ``width`` characters; each stretch of pages is six lines."""
    cells = [[*_cell(page, page_size)] for page in pages]
    cell_width = 1 + max(cell_len for cell in cells for cell_len in (len(text) for text, _ in cell))
    per_line = max(1, (width - _LABEL_WIDTH) // cell_width)
    for first in range(0, len(cells), per_line):
        if first:
            yield Text()
        stretch = cells[first : first + per_line]
        for line, label in enumerate(_LABELS):
            text = Text(label.ljust(_LABEL_WIDTH), "dim")
            for cell in stretch:
                value, style = cell[line]
                text.append(value.rjust(cell_width - 1), style).append(" ")
            text.rstrip()
            yield text


def _cell(page: Page, page_size: int) -> Iterator[tuple[str, str]]:
    """The six (text, style) of a page."""
    colour = COLOURS[page.owner % len(COLOURS)]
    stranger = any(rank != page.owner for rank in page.computed_by)
    yield str(page.position), "dim"
    yield str(page.logical), ""
    yield str(page.owner), f"bold white on {colour}"
    yield ",".join(map(str, page.computed_by)) or "-", "bold red" if stranger else ""
    partial = page.rows < page_size
    yield f"{page.rows}{'<' if partial else ''}", "bold yellow" if partial else ""
    yield page.source, "dim" if page.source == "cache" else ""


def _verdict(forward: Anatomy) -> Text:
    style = "green" if forward.write == "direct" else "yellow"
    return Text.assemble(("write ", "bold"), (forward.write, f"bold {style}"), f": {forward.reason}")


def _ranks(forward: Anatomy) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("rank", justify="right")
    table.add_column("prev", overflow="fold")
    table.add_column("next", overflow="fold")
    table.add_column("rows", justify="right")
    table.add_column("kv_stop", overflow="fold")
    table.add_column("sends: write", justify="right")
    table.add_column("view", justify="right")
    for rank in forward.ranks:
        table.add_row(
            Text(str(rank.rank), f"bold white on {COLOURS[rank.rank % len(COLOURS)]}"),
            _spans(rank.prev) or _round_robin(forward, rank),
            _spans(rank.next) or "-",
            _rows(rank),
            " ".join(str(piece.stop) for piece in (*rank.prev, *rank.next)) or "-",
            "-" if rank.write_rows is None else _padded(rank.write_rows, rank.write_filler, "row"),
            _padded(rank.view_pages, rank.view_filler, "page"),
        )
    return table


def _spans(pieces: Iterable[Piece]) -> str:
    return " ".join(f"{piece.request}[{piece.start}:{piece.stop}]" for piece in pieces)


def _round_robin(forward: Anatomy, rank: Rank) -> str:
    return f"every {forward.world_size}th row" if forward.split == "round_robin" and rank.rows else "-"


def _rows(rank: Rank) -> str:
    return f"{rank.rows} ({rank.padding_rows} padding)" if rank.padding_rows else str(rank.rows)


def _padded(number: int, filler: int, unit: str) -> str:
    """``3 pages +1``: what is sent, and how much is put behind it so that all ranks send alike."""
    return f"{_count(number, unit)} +{filler}" if filler else _count(number, unit)
