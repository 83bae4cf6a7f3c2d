"""The split of one batch: a value that every rank computes alike from shared metadata (laws S4–S7, S9).

*Batch rows* are the new tokens of all requests in batch order, then padding rows. A rank holds some of them,
its *local rows*: the prev segments of every request in batch order (then its first share of the padding),
then the next segments. Index tensors are int64 on the CPU, linear in tokens.

>>> plan = plan_batch([Extent(0, 5), Extent(0, 3)], Grid(2, 64), Split.TOKEN_BALANCED)
>>> plan.row_counts, plan.rows(0).tolist(), plan.rows(1).tolist()
((4, 4), [0, 1, 5, 4], [2, 6, 3, 7])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from refmodel.errors import InvalidInput, Where
from refmodel.layout.geometry import Extent, Grid, at_least, check_in_range
from refmodel.layout.rows import buffer_places, buffer_rows
from refmodel.layout.split import (
    Split,
    page_aligned_bounds,
    rank_segments,
    token_balanced_bounds,
)

PADDING = -1  # stands where a request or a position would, for a padding row


@dataclass(frozen=True, slots=True)
class Segment:
    """A rank's piece of one request: absolute positions [start, stop)."""

    request: int  # index in the batch
    start: int
    stop: int  # also kv_stop: the keys its last row sees (S6)

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Half:
    """The prev or the next half of a rank's local rows: its segments, then its padding rows."""

    segments: tuple[Segment, ...]  # one a request, also when empty; none for round-robin
    rows: torch.Tensor  # [rows] batch rows
    valid_rows: int  # the first so many are real: a contiguous prefix, from metadata (S7)


@dataclass(frozen=True, eq=False)
class Plan:
    """The split of one batch over W ranks. Build it with :func:`plan_batch`."""

    grid: Grid
    split: Split
    extents: tuple[Extent, ...]
    rotations: tuple[int, ...]  # of each request, 0 … W−1
    padding: int  # padding rows behind the real ones

    def __post_init__(self) -> None:
        if not self.extents:
            raise InvalidInput("batch", expected="at least one extent", received="none")
        if len(self.rotations) != len(self.extents):
            raise InvalidInput(
                "rotations", expected=f"{len(self.extents)}, one a request", received=len(self.rotations)
            )
        at_least(0, self.padding, "padding rows of a batch")
        for i, rotation in enumerate(self.rotations):
            check_in_range(rotation, self.grid.world_size, "rotation", Where(request=str(i)))
        if self.split is Split.ROUND_ROBIN and any(self.rotations):
            raise InvalidInput("rotations", expected="0 with a round-robin split", received=self.rotations)

    # -- batch rows ------------------------------------------------------------------------------------

    @cached_property
    def row_starts(self) -> tuple[int, ...]:
        """[requests + 1] first batch row of each request; the last entry is the number of real rows."""
        return tuple(accumulate((extent.tokens for extent in self.extents), initial=0))

    @property
    def real_rows(self) -> int:
        return self.row_starts[-1]

    @property
    def num_rows(self) -> int:
        """Real rows and padding rows."""
        return self.real_rows + self.padding

    @cached_property
    def request_of_row(self) -> torch.Tensor:
        """[num_rows] index of the request; −1 for padding rows (S9)."""
        counts = torch.tensor([*(extent.tokens for extent in self.extents), self.padding])
        requests = torch.tensor([*range(len(self.extents)), PADDING])
        return torch.repeat_interleave(requests, counts)

    @cached_property
    def positions(self) -> torch.Tensor:
        """[num_rows] absolute position in the request; −1 for padding rows."""
        spans = [torch.arange(extent.prefix, extent.end) for extent in self.extents]
        return torch.cat([*spans, torch.full((self.padding,), PADDING)])

    @cached_property
    def key_starts(self) -> tuple[int, ...]:
        """[requests + 1] first row of each request in the flattened K, which holds prefix and new tokens."""
        return tuple(accumulate((extent.end for extent in self.extents), initial=0))

    def visibility(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(ks, ke), each [rows]: the batch row at position p sees rows ks … ks + p of the flattened K (S6).

        Padding rows see nothing: ks = ke = 0.
        """
        requests, positions = self.request_of_row[rows], self.positions[rows]
        real = requests != PADDING
        ks = torch.where(real, torch.tensor(self.key_starts)[requests], 0)
        return ks, torch.where(real, ks + positions + 1, 0)

    # -- ranks -----------------------------------------------------------------------------------------

    @cached_property
    def bounds(self) -> tuple[tuple[int, ...], ...]:
        """[requests][2W + 1] absolute positions that cut each request into segments. Not for round-robin."""
        cut = page_aligned_bounds if self.split is Split.PAGE_ALIGNED else token_balanced_bounds
        return tuple(cut(extent, self.grid) for extent in self.extents)

    @cached_property
    def _padding_bounds(self) -> tuple[int, ...]:
        """Padding has no pages, so both zigzags split it token-balanced: in batch rows, [2W + 1]."""
        return token_balanced_bounds(Extent(self.real_rows, self.padding), self.grid)

    def halves(self, rank: int) -> tuple[Half, Half]:
        """(prev, next) of a rank. With round-robin all rows are in the first, none in the second."""
        check_in_range(rank, self.grid.world_size, "rank", Where(rank=rank))
        rows = self._rank_rows[rank]
        if self.split is Split.ROUND_ROBIN:
            valid = len(range(rank, self.real_rows, self.grid.world_size))
            return Half((), rows, valid), Half((), rows[:0], 0)
        first, second = self._segments(rank, 0), self._segments(rank, 1)
        cut = sum(map(len, self._spans(rank, 0)))
        prev = Half(first, rows[:cut], sum(segment.tokens for segment in first))
        return prev, Half(second, rows[cut:], sum(segment.tokens for segment in second))

    def _segments(self, rank: int, which: int) -> tuple[Segment, ...]:
        """Of each request that of a rank's half 0 or 1."""
        pieces = []
        for request, bounds in enumerate(self.bounds):
            i = rank_segments(rank, self.grid.world_size, self.rotations[request])[which]
            pieces.append(Segment(request, bounds[i], bounds[i + 1]))
        return tuple(pieces)

    def _spans(self, rank: int, which: int) -> list[range]:
        """The batch rows of a rank's half 0 or 1: of each request, then of the padding."""
        spans = []
        for segment, extent, row in zip(
            self._segments(rank, which), self.extents, self.row_starts, strict=False
        ):
            first = row + segment.start - extent.prefix
            spans.append(range(first, first + segment.tokens))
        if self.padding:
            i = rank_segments(rank, self.grid.world_size)[which]
            spans.append(range(self._padding_bounds[i], self._padding_bounds[i + 1]))
        return spans

    @cached_property
    def _rank_rows(self) -> tuple[torch.Tensor, ...]:
        W = self.grid.world_size
        if self.split is Split.ROUND_ROBIN:
            return tuple(torch.arange(rank, max(rank, self.num_rows), W) for rank in range(W))
        spans = [[*self._spans(rank, 0), *self._spans(rank, 1)] for rank in range(W)]
        rows = _rows_of([span for of_rank in spans for span in of_rank])
        return tuple(torch.split(rows, [sum(map(len, of_rank)) for of_rank in spans]))

    def rows(self, rank: int) -> torch.Tensor:
        """[row_counts[rank]] batch rows of a rank, in local order."""
        check_in_range(rank, self.grid.world_size, "rank", Where(rank=rank))
        return self._rank_rows[rank]

    @cached_property
    def row_counts(self) -> tuple[int, ...]:
        """[W] local rows of each rank."""
        return tuple(len(rows) for rows in self._rank_rows)

    @property
    def max_rank_rows(self) -> int:
        """Rows of a rank's gather buffer: the longest rank's, which is not ceil(n / W) (S4)."""
        return buffer_rows(self.row_counts)

    @cached_property
    def gather_order(self) -> torch.Tensor:
        """[num_rows] batch rows in the order in which a gather of all ranks brings them."""
        return torch.cat(self._rank_rows)

    @cached_property
    def rank_of_row(self) -> torch.Tensor:
        """[num_rows] rank that computes each batch row."""
        ranks = torch.repeat_interleave(torch.arange(self.grid.world_size), torch.tensor(self.row_counts))
        return torch.empty_like(ranks).index_put_((self.gather_order,), ranks)

    def take(self, batch: torch.Tensor, rank: int) -> torch.Tensor:
        """[num_rows, …] → the rank's local rows [row_counts[rank], …]."""
        return batch[self.rows(rank)]

    def cut(self, local: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Local rows (q, weights) → (prev, next), by segment lengths: never in half (S5)."""
        prev = len(self.halves(rank)[0].rows)
        return local[:prev], local[prev:]

    @cached_property
    def places(self) -> torch.Tensor:
        """[num_rows] where each batch row lies in the gather buffers of all ranks."""
        return torch.empty(self.num_rows, dtype=torch.int64).index_put_(
            (self.gather_order,), buffer_places(self.row_counts)
        )

    def rerange(self, buffers: torch.Tensor) -> torch.Tensor:
        """Buffers of all ranks [W × max_rank_rows, …] → batch order [num_rows, …]: undoes `take` (S4)."""
        return buffers[self.places.to(buffers.device)]


def _rows_of(spans: Sequence[range]) -> torch.Tensor:
    """[sum of lengths] the rows of all spans, one behind the other."""
    lengths = torch.tensor([len(span) for span in spans])
    starts = torch.tensor([span.start for span in spans])
    behind = lengths.cumsum(0)  # where each ends among all rows
    return torch.repeat_interleave(starts - behind + lengths, lengths) + torch.arange(sum(map(len, spans)))


def plan_batch(
    extents: Sequence[Extent],
    grid: Grid,
    split: Split,
    *,
    rotations: Sequence[int] | None = None,
    padding: int = 0,
) -> Plan:
    """Split a batch: each request alone (S1), padding rows behind the real ones (S9).

    ``rotations``: one a request, 0 … W−1, default all 0. :class:`InvalidInput` for an empty batch, a rotation
    out of range, a negative padding.
    """
    return Plan(grid, split, tuple(extents), tuple(rotations or [0] * len(extents)), padding)
