"""What cases of the indexer and of top-k share: rows of several requests, each with its keys (law S6)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st

from properties.kernels.cases.case import Case
from refmodel.attention.ranges import KeyRanges

NASTY_SIZES = (0, 1, 2, 3, 5, 15, 16, 17, 31, 33)


@dataclass(frozen=True, kw_only=True)
class QueryRows(Case):
    """Rows as half of a rank's rows holds them, over the flattened K of the batch."""

    prefixes: tuple[int, ...]  # keys of each request before its first row
    tokens: tuple[int, ...]  # rows of each request; 0: it has none in this half
    behind: int = 0  # keys of each request behind its last row, which its rows do not see
    padding: int = 0  # rows behind those of the requests, which see nothing (S9)

    @property
    def lengths(self) -> tuple[int, ...]:
        """[requests] keys of each."""
        return tuple(p + n + self.behind for p, n in zip(self.prefixes, self.tokens, strict=True))

    @property
    def key_starts(self) -> tuple[int, ...]:
        """[requests + 1] where the keys of each request begin in the flattened K, then their number."""
        return tuple(accumulate(self.lengths, initial=0))

    @property
    def cu_seqlens_q(self) -> tuple[int, ...]:
        """[requests + 1] first row of each request; rows behind the last are padding."""
        return tuple(accumulate(self.tokens, initial=0))

    @property
    def rows(self) -> int:
        """All of them, padding included."""
        return sum(self.tokens) + self.padding

    def of_rows(self, of_requests: tuple[int, ...]) -> torch.Tensor:
        """[rows] int64: what is given for each request, for its rows; 0 for padding."""
        counts = torch.tensor((*self.tokens, self.padding))
        return torch.tensor((*of_requests, 0)).repeat_interleave(counts)

    def ranges(self) -> KeyRanges:
        """A row at position p sees keys 0 … p of its request; padding sees nothing."""
        ks, first_rows = self.of_rows(self.key_starts[:-1]), self.of_rows(self.cu_seqlens_q[:-1])
        ke = ks + self.of_rows(self.prefixes) + torch.arange(self.rows) - first_rows + 1
        ke[sum(self.tokens) :] = 0
        return KeyRanges(ks, ke, self.key_starts[-1])


@st.composite
def query_rows(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a case: up to three requests, sizes around those of tiles, some without rows."""
    sizes = st.sampled_from(NASTY_SIZES)
    requests = draw(st.lists(st.tuples(sizes, st.integers(0, 5)), min_size=1, max_size=3))
    return {
        "prefixes": tuple(prefix for prefix, _ in requests),
        "tokens": tuple(tokens for _, tokens in requests),
        "behind": draw(st.integers(0, 3)),
        "padding": draw(st.integers(0, 2)),
        "seed": draw(st.integers(0, 2**16)),
    }
