"""Wrong plans of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from properties.mutants.mutant import Right, mutant
from refmodel.layout import rows
from refmodel.layout.ownership import PageTable, current_slots
from refmodel.layout.plan import Half, Plan
from refmodel.layout.rows import buffer_places
from refmodel.layout.split import Split

Ranges = tuple[torch.Tensor, torch.Tensor]


@mutant(Plan.visibility, "split-01", "S6", source="reported in sglang#23415")
def prefix_clamped_to_zero(right: Right, self: Plan, batch_rows: torch.Tensor) -> Ranges:
    """The prefix is padded minus unpadded length, −1, clamped to 0: rows see too few keys."""
    ks, ke = right(self, batch_rows)
    prefixes = torch.tensor([*(extent.prefix for extent in self.extents), 0])
    return ks, torch.maximum(ks, ke - prefixes[self.request_of_row[batch_rows]])


@mutant(Plan.row_counts, "split-03", "S1", "S4", source="reported in TransformerEngine#3331")
def average_rows_everywhere(self: Plan) -> tuple[int, ...]:
    """Every rank is taken to have the average number of rows."""
    return (self.num_rows // self.grid.world_size,) * self.grid.world_size


@mutant(Plan.cut, "split-04", "S5", source="reported in EasyContext#47")
def cut_in_half(self: Plan, local: torch.Tensor, rank: int) -> Ranges:
    """Local rows are cut in half, also when their number is odd."""
    return local[: len(local) // 2], local[len(local) // 2 :]


@mutant(Plan.cut, "split-07", "S5", source="derived from the fork's history")
def cut_page_aligned_in_half(right: Right, self: Plan, local: torch.Tensor, rank: int) -> Ranges:
    """The cut that is right for token-balanced segments, (n + 1) div 2, is used for page-aligned ones."""
    if self.split is not Split.PAGE_ALIGNED:
        return right(self, local, rank)
    middle = (len(local) + 1) // 2
    return local[:middle], local[middle:]


@mutant(rows.buffer_rows, "split-09", "S4")
def average_buffer(counts: Sequence[int]) -> int:
    """The gather buffer holds ceil(n / W) rows, where the longest rank has more."""
    return -(-sum(counts) // len(counts))


@mutant(Plan.visibility, "split-10", "S6", source="reported in sglang#20531, sglang#18280")
def absent_requests_dropped_from_one_table(right: Right, self: Plan, batch_rows: torch.Tensor) -> Ranges:
    """Requests without rows here are dropped from the table of starts, not from the index into it."""
    ks, ke = right(self, batch_rows)
    requests = self.request_of_row[batch_rows]
    present = requests[requests >= 0].unique().tolist()
    starts = torch.tensor([*(self.key_starts[r] for r in present), *[0] * len(self.extents)])
    wrong = torch.where(requests >= 0, starts[requests], ks)
    return wrong, wrong + ke - ks


@mutant(Plan.visibility, "split-11", "S6", source="reported in sglang#29161")
def lengths_not_reordered(right: Right, self: Plan, batch_rows: torch.Tensor) -> Ranges:
    """Queries are in rank order, their lengths still in batch order."""
    in_rank_order = torch.argsort(self.gather_order)[batch_rows]
    return right(self, in_rank_order)


@mutant(Plan.key_starts, "starts-without-prefix", "S6")
def starts_of_new_tokens_only(self: Plan) -> tuple[int, ...]:
    """The flattened K is taken to hold new tokens only, as if no request had a prefix."""
    return self.row_starts


@mutant(Plan.places, "rerange-inverted", "S4")
def rerange_by_the_inverse(self: Plan) -> torch.Tensor:
    """The permutation is applied instead of undone: right at W = 2, where it is often its own inverse."""
    return buffer_places(self.row_counts)[self.gather_order]


@mutant(rows.trim_rows, "padding-leaks", "S4")
def trim_to_the_longest(gathered: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Every buffer is trimmed to the longest rank that has fewer than all rows: padding leaks."""
    length = gathered.shape[0] // len(counts)
    return torch.cat([gathered[i * length :][: length if n else 0] for i, n in enumerate(counts)])


@mutant(Plan.halves, "padding-rows-valid", "S7")
def padding_counts_as_valid(right: Right, self: Plan, rank: int) -> tuple[Half, Half]:
    """The number of valid rows is the number of rows, padding included."""
    prev, following = right(self, rank)
    return (
        Half(prev.segments, prev.rows, len(prev.rows)),
        Half(following.segments, following.rows, len(following.rows)),
    )


@mutant(Plan.request_of_row, "padding-joins-the-last-request", "S9", source="sglang's convention")
def padding_joins_the_last_request(self: Plan) -> torch.Tensor:
    """Padding rows are charged to the last request of the batch."""
    counts = [extent.tokens for extent in self.extents]
    counts[-1] += self.padding
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


@mutant(current_slots, "padding-on-one-dummy", "S9")
def all_padding_on_rank_zero(right: Right, plan: Plan, tables: Sequence[PageTable]) -> torch.Tensor:
    """All padding rows go to logical page 0, the dummy of rank 0, whoever computes them."""
    slots = right(plan, tables)
    slots[plan.real_rows :] %= plan.grid.page_size
    return slots
