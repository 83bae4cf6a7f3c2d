"""A trace as work for a serving engine: requests of blocks, and pools that are too small for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from refmodel.errors import InvalidInput
from refmodel.layout.geometry import at_least, ceil_div, num_pages
from sim.cases.trace import BLOCK, Request, distinct_pages
from sim.histories.history import History, Submit

LAWS = ("L1", "L3", "L4", "L5", "L6", "L7", "H3", "H4", "H5", "V1")


@dataclass(frozen=True, slots=True)
class Service:
    """What is served, and by what. The same on all ranks."""

    requests: Sequence[Request]
    setting: History  # of the engine; it has no steps: those are chosen as it runs
    distinct_pages: int  # that all requests would leave in a cache without an end
    window: int = 4  # requests at a time
    decodes: int = 2  # most sampled tokens of a request
    every: int = 1  # tables are compared and checked after so many steps, and at the end

    def __post_init__(self) -> None:
        at_least(1, self.window, "requests at a time")
        at_least(0, self.decodes, "sampled tokens of a request")
        at_least(1, self.every, "steps between two checks")

    def submit(self, number: int, name: str) -> Submit:
        """The request of a line, the first is 0."""
        request = self.requests[number]
        return Submit(
            name,
            request.input_length,
            blocks=request.hash_ids,
            block_tokens=BLOCK,
            prefetch=self.setting.storage,
        )


def trace_service(
    requests: Sequence[Request],
    *,
    world_size: int,
    page_size: int,
    pool: float,
    chunk: int,
    every: int = 1,
) -> Service:
    """A service whose lanes hold ``pool`` percent of the distinct pages of a trace, and its host twice that.

    :class:`InvalidInput` if the longest request alone would not fit, or for a chunk below a page.
    """
    if chunk < page_size:
        raise InvalidInput("--chunk", expected=f"at least {page_size}, a page", received=chunk)
    pages = distinct_pages(requests, page_size)
    per_lane = ceil(pages * pool / 100 / world_size)
    least = _least_per_lane(requests, world_size, page_size, chunk)
    if per_lane < least:
        raise InvalidInput(
            "--pool",
            expected=f"at least {100 * least * world_size / pages:.1f}%: "
            f"the longest request needs {least} pages of a lane",
            received=f"{pool:g}%, {per_lane} pages of a lane",
        )
    setting = History(
        title="A trace through the engine",
        why="Requests of a trace, over pools that are too small for all of them.",
        laws=list(LAWS),
        world_size=world_size,
        page_size=page_size,
        pages_per_lane=per_lane,
        history=[],
        chunk=chunk,
        max_tokens=chunk,
        rotate=True,
        host_pages_per_lane=2 * per_lane,
        storage=True,
    )
    return Service(requests, setting, pages, every=every)


def _least_per_lane(requests: Sequence[Request], world_size: int, page_size: int, chunk: int) -> int:
    """Pages of a lane that the longest request may need: each chunk rounds up, and so does a copied tail."""
    longest = max(request.input_length for request in requests)
    chunks = ceil_div(longest, chunk - chunk % page_size)
    return ceil_div(num_pages(longest, page_size), world_size) + chunks + 2
