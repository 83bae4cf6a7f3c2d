"""Request traces in Mooncake's format: read, generate, and turn into a case at full length.

One JSON object a line: ``timestamp`` (ms), ``input_length`` and ``output_length`` (tokens), ``hash_ids`` (one
id a block of 512 tokens; equal leading ids are a shared prefix). The traces of the FAST'25 paper are in
kvcache-ai/Mooncake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from refmodel.errors import InvalidInput, Where
from refmodel.layout.geometry import Extent, Grid, ceil_div, num_pages
from refmodel.layout.ownership import PageTable
from refmodel.layout.placement import new_page_lanes
from refmodel.layout.plan import plan_batch
from refmodel.layout.split import Split
from refmodel.storage.formats import TAG
from refmodel.storage.identity import Cache
from sim.cases.case import Case, Forward, Origin, Turn
from sim.cases.pages import PagePool

BLOCK = 512  # tokens a hash id stands for
Rotation = Literal["none", "least-full"]


class Request(msgspec.Struct, frozen=True):
    """One line of a trace. Other keys are left alone: traces carry more than this needs."""

    timestamp: float
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: list[int]


def read_trace(path: Path, limit: int | None = None) -> list[Request]:
    """The first ``limit`` requests of a file. :class:`InvalidInput` names the line that is not one."""
    requests: list[Request] = []
    decoder = msgspec.json.Decoder(Request)
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if len(requests) == limit:
                    break
                if line.strip():
                    requests.append(_parse(decoder, line, Where(file=str(path), line=number)))
    except OSError as error:
        raise InvalidInput("trace", expected="a readable file", received=str(error)) from error
    if not requests:
        raise InvalidInput(
            "trace", expected="at least one request", received="none", where=Where(file=str(path))
        )
    return requests


def _parse(decoder: msgspec.json.Decoder[Request], line: bytes, where: Where) -> Request:
    try:
        request = decoder.decode(line)
    except msgspec.DecodeError as error:
        raise InvalidInput(
            "trace line",
            expected="a JSON object with timestamp, input_length, output_length and hash_ids",
            received=f"{line[:60].decode(errors='replace').strip()!r} ({error})",
            where=where,
        ) from error
    blocks = ceil_div(request.input_length, BLOCK)
    if len(request.hash_ids) != blocks:
        raise InvalidInput(
            "trace line",
            expected=f"{blocks} hash_ids for {request.input_length} tokens, one a block of {BLOCK}",
            received=len(request.hash_ids),
            where=where,
        )
    return request


def generate_trace(requests: int, seed: int = 0) -> list[Request]:
    """Conversations that grow turn by turn behind a shared system prompt, in arrival order."""
    random = np.random.default_rng(seed)
    next_id = 1
    conversations: list[list[int]] = []
    trace = []
    for i in range(requests):
        if not conversations or random.random() < 0.4:
            conversations.append([0])
        blocks = conversations[int(random.integers(len(conversations)))]
        fresh = int(random.integers(1, 9))
        blocks += range(next_id, next_id + fresh)
        next_id += fresh
        length = len(blocks) * BLOCK - int(random.integers(BLOCK))
        trace.append(Request(100.0 * i, length, int(random.integers(1, 800)), list(blocks)))
        if length % BLOCK:
            blocks.pop()  # a partial block is not what the next turn starts with
    return trace


def write_trace(requests: Sequence[Request], path: Path) -> None:
    """Write requests, one JSON object a line."""
    path.write_bytes(b"".join(msgspec.json.encode(request) + b"\n" for request in requests))


@dataclass(frozen=True, slots=True, eq=False)
class TraceCase:
    """A trace as a case, and what is known of it before it runs."""

    case: Case
    hit_tokens: int  # tokens found in cache
    lane_pages: tuple[int, ...]  # [W] pages held by each lane at the end

    @property
    def requests(self) -> int:
        return len(self.case.forwards)

    @property
    def tokens(self) -> int:
        return sum(forward.valid[0] for forward in self.case.forwards)

    @property
    def hit_share(self) -> float:
        """Share of the tokens that came from a prefix seen earlier, in whole pages."""
        return self.hit_tokens / self.tokens

    @property
    def imbalance(self) -> float:
        """Pages of the fullest lane over the mean; 1.0 is even."""
        return max(self.lane_pages) * len(self.lane_pages) / sum(self.lane_pages)


class _Seen:
    """Who first wrote each chain of leading blocks. An id counts only behind the ids it was seen behind."""

    def __init__(self) -> None:
        self._chain_after: dict[tuple[int, int], int] = {}  # (chain, next block) → longer chain
        self._writers: list[int] = []  # of each chain; the empty one is -1

    def longest(self, blocks: Sequence[int]) -> tuple[int, int | None]:
        """(leading blocks seen before, who wrote them)."""
        chain, seen = -1, 0
        for block in blocks:
            if (chain, block) not in self._chain_after:
                break
            chain, seen = self._chain_after[chain, block], seen + 1
        return seen, self._writers[chain] if seen else None

    def add(self, blocks: Sequence[int], writer: int) -> None:
        chain = -1
        for block in blocks:
            longer = self._chain_after.setdefault((chain, block), len(self._writers))
            if longer == len(self._writers):
                self._writers.append(writer)
            chain = longer


def distinct_pages(requests: Sequence[Request], page_size: int) -> int:
    """Pages that a cache without an end would hold of a trace: whole ones once, and each request's tail."""
    seen, lengths, pages = _Seen(), list[int](), 0
    for number, request in enumerate(requests):
        blocks, writer = seen.longest(request.hash_ids)
        shared = min(blocks * BLOCK, lengths[writer], request.input_length) if writer is not None else 0
        pages += num_pages(request.input_length, page_size) - shared // page_size
        seen.add(request.hash_ids, number)
        lengths.append(request.input_length)
    return pages


class _TraceBuilder:
    """An unbounded cache: a request reuses the longest prefix that an earlier one wrote, in whole pages."""

    def __init__(self, requests: Sequence[Request], grid: Grid, rotation: Rotation, seed: int) -> None:
        self.grid, self.rotation = grid, rotation
        # An extent of U units adds at most ceil(U / W) pages to a lane (O6).
        units = (num_pages(request.input_length, grid.page_size) for request in requests)
        self.local_pages = 1 + sum(ceil_div(unit, grid.world_size) for unit in units)
        self.pool = PagePool(grid, self.local_pages, seed)
        self.turns: list[Turn] = []
        self.seen = _Seen()
        self.lane_pages = np.zeros(grid.world_size, dtype=np.int64)
        self.hit_tokens = 0

    def add(self, request: Request) -> Forward:
        number = len(self.turns)
        prefix, source = self._match(request)
        self.hit_tokens += prefix
        turn = self._turn(number, request, prefix, source)
        self.turns.append(turn)
        self.seen.add(request.hash_ids, number)
        return Forward(step=1, turns=(turn,))

    def _match(self, request: Request) -> tuple[int, Turn | None]:
        """Tokens found in cache, and who has them. At most all but one token, in whole pages (L4)."""
        blocks, writer = self.seen.longest(request.hash_ids)
        if writer is None:
            return 0, None
        source = self.turns[writer]
        hit = min(blocks * BLOCK, source.extent.end, request.input_length - 1)
        return hit // self.grid.page_size * self.grid.page_size, source

    def _turn(self, number: int, request: Request, prefix: int, source: Turn | None) -> Turn:
        extent, name = Extent(prefix, request.input_length - prefix), f"line {number + 1}"
        rotation = self._evening_rotation(extent) if self.rotation == "least-full" else 0
        lanes = self._new_page_lanes(extent, rotation)
        self.lane_pages += np.bincount(lanes, minlength=self.grid.world_size)
        pages, origins = self.pool.take(lanes), [Origin(prefix, extent.end, number, write=1)]
        if source is not None:
            pages = torch.cat([source.table.pages[: prefix // self.grid.page_size], pages])
            reused = (origin for origin in source.origins if origin.start < prefix)
            origins = [*(replace(o, stop=min(o.stop, prefix)) for o in reused), *origins]
        return Turn(name, number, extent, rotation, PageTable(pages, self.grid, name), tuple(origins))

    def _evening_rotation(self, extent: Extent) -> int:
        """The rotation that leaves the lanes most alike. Taking the emptiest lane first often does not:
        with three pages on two ranks it is the second rank that gets two."""
        new = np.bincount(self._new_page_lanes(extent), minlength=self.grid.world_size)
        spread = [
            np.square(self.lane_pages + np.roll(new, rotation)).sum()
            for rotation in range(self.grid.world_size)
        ]
        return int(np.argmin(spread))

    def _new_page_lanes(self, extent: Extent, rotation: int = 0) -> npt.NDArray[np.int64]:
        plan = plan_batch([extent], self.grid, Split.PAGE_ALIGNED, rotations=[rotation])
        return new_page_lanes(plan, 0).numpy()


def trace_case(
    requests: Sequence[Request],
    *,
    world_size: int = 8,
    page_size: int = 64,
    rotation: Rotation = "none",
    seed: int = 0,
) -> TraceCase:
    """Plan a trace: reuse, lanes, pages. Every forward is one request, at its full length."""
    grid = Grid(world_size, page_size)
    builder = _TraceBuilder(requests, grid, rotation, seed)
    case = Case(
        grid=grid,
        split=Split.PAGE_ALIGNED,
        formats={Cache.KV: TAG},
        forwards=tuple(builder.add(request) for request in requests),
        local_pages=builder.local_pages,
        checks=frozenset({"identity", "isolation"}),
    )
    return TraceCase(case, builder.hit_tokens, tuple(builder.lane_pages.tolist()))
