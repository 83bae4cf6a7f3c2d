"""A scenario drawn as a picture: the ownership strips and the work of each rank, one panel a forward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refmodel.errors import InvalidInput
from refmodel.layout.geometry import ceil_div
from sim.picture.anatomy import Anatomy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES_A_PAGE = 0.42
_NARROWEST, _WIDEST = 7.0, 30.0
_MOST_TICKS = 60


def draw(forwards: Sequence[Anatomy], title: str, file: Path) -> None:
    """Write a picture; the ending of ``file`` is its format. :class:`InvalidInput` without matplotlib."""
    figure_class, colours = _matplotlib()
    heights = [len(forward.requests) + 0.6 for forward in forwards]
    most_pages = max(len(strip.pages) for forward in forwards for strip in forward.requests)
    width = min(max(_NARROWEST, most_pages * _INCHES_A_PAGE + 1.5), _WIDEST)
    figure = figure_class(figsize=(width, 0.8 + 0.95 * sum(heights)), layout="constrained")
    figure.suptitle(title, fontsize=11)
    panels = figure.subplots(len(forwards), 1, squeeze=False, height_ratios=heights)[:, 0]
    for forward, axes in zip(forwards, panels, strict=True):
        _draw_forward(axes, forward, colours, most_pages)
    try:
        figure.savefig(file, dpi=130)
    except (OSError, ValueError) as error:
        raise InvalidInput("--png", expected="a picture file that can be written", received=error) from error


def _matplotlib() -> tuple[Any, Any]:
    try:
        from matplotlib import color_sequences
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidInput(
            "--png", expected="matplotlib", received="none", fix="pip install cpkv-testbed[plot]"
        ) from error
    return Figure, color_sequences["tab20"]


def _draw_forward(axes: Axes, forward: Anatomy, colours: Sequence[Any], most_pages: int) -> None:
    """A row a request; the box of a page is its owner's, the bar below it its compute rank's."""
    for y, strip in enumerate(forward.requests):
        for page in strip.pages:
            x, share = page.position, page.rows / forward.page_size
            colour = colours[page.owner % len(colours)]
            faded = 0.35 if page.source == "cache" else 0.9
            axes.barh(y, 0.94, left=x, height=0.62, color="none", edgecolor=colour, linewidth=1)
            axes.barh(y, 0.94 * share, left=x, height=0.62, color=colour, alpha=faded)
            axes.text(x + 0.47, y, f"{page.logical}\n→{page.owner}", ha="center", va="center", fontsize=7)
            for i, rank in enumerate(page.computed_by):
                part = 0.94 / len(page.computed_by)
                axes.barh(y + 0.4, part, left=x + i * part, height=0.1, color=colours[rank % len(colours)])
    axes.set_title(
        f"step {forward.step}: {forward.split}, W = {forward.world_size}, P = {forward.page_size}; "
        f"{forward.write} write",
        loc="left",
        fontsize=9,
    )
    axes.set_yticks(range(len(forward.requests)), [strip.request for strip in forward.requests])
    ticks = range(0, most_pages, ceil_div(most_pages, _MOST_TICKS))
    axes.set_xticks([x + 0.47 for x in ticks], [str(x) for x in ticks], fontsize=7)
    axes.set_xlim(-0.1, most_pages)
    axes.set_ylim(len(forward.requests) - 0.35, -0.5)
    axes.set_xlabel("page position; logical page → owner; bar below: who computes it", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
