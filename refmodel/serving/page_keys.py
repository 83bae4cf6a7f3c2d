"""What a radix tree compares: the keys of whole pages (law L8).

A plain key is a token. A bigram key, of the draft model, is a pair of neighbours (t0, t1), (t1, t2), …: the
draft row of a token also depends on the next one. So n tokens give n − 1 bigram keys, and a page of P of them
needs P + 1 tokens. A *page key* is the tokens that the keys of one page are made of; two neighbouring bigram
pages share a token.

>>> PageKeys(64, bigram=True).count(65), PageKeys(64, bigram=True).count(64), PageKeys(64).count(64)
(64, 63, 64)
>>> PageKeys(2, bigram=True).cut([5, 6, 7, 8])
(((5, 6, 7),), (7, 8))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refmodel.layout.geometry import at_least

PageKey = tuple[int, ...]  # [keys + overlap] tokens


@dataclass(frozen=True, slots=True)
class PageKeys:
    """How tokens become the keys of pages of P slots."""

    page_size: int  # P, >= 1
    bigram: bool = False

    def __post_init__(self) -> None:
        at_least(1, self.page_size, "page size P")

    @property
    def overlap(self) -> int:
        """Tokens that a page key has beyond its keys."""
        return 1 if self.bigram else 0

    def count(self, num_tokens: int) -> int:
        """Keys that so many tokens give (L8)."""
        return max(0, num_tokens - self.overlap)

    def cut(self, tokens: Sequence[int]) -> tuple[tuple[PageKey, ...], PageKey]:
        """Tokens [n] → (page keys of the whole pages, the short one of the tail; empty if there is none)."""
        P = self.page_size
        num_keys = self.count(len(tokens))
        starts = range(0, num_keys - num_keys % P, P)
        whole = tuple(tuple(tokens[start : start + P + self.overlap]) for start in starts)
        return whole, tuple(tokens[len(whole) * P :]) if num_keys % P else ()

    def length(self, page_key: PageKey) -> int:
        """Keys of a page: P, or fewer in a tail."""
        return self.count(len(page_key))

    def common(self, one: PageKey, other: PageKey) -> int:
        """How many first keys two pages share."""
        pairs = enumerate(zip(one, other, strict=False))
        shared = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
        return self.count(shared)
