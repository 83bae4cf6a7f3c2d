"""What a radix tree compares: the keys of whole pages (law L8).

A plain key is a token. A bigram key, of the draft model, is a pair of neighbours (t0, t1), (t1, t2), …: the
draft row of a token also depends on the next one. So n tokens give n − 1 bigram keys, and a page of P of them
needs P + 1 tokens. A *page key* is the tokens that the keys of one page are made of; two neighbouring bigram
pages share a token. It is their bytes, 8 a token, not a hash of them: equal page keys are equal tokens.

>>> PageKeys(64, bigram=True).count(65), PageKeys(64, bigram=True).count(64), PageKeys(64).count(64)
(64, 63, 64)
>>> whole, short = PageKeys(2, bigram=True).cut([5, 6, 7, 8])
>>> [tokens_of(key).tolist() for key in whole], tokens_of(short).tolist(), len(short)
([[5, 6, 7]], [7, 8], 16)
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from refmodel.errors import InvalidInput
from refmodel.layout.geometry import at_least

PageKey = bytes  # of [keys + overlap] tokens, each a little-endian uint64
Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.uint64] | npt.NDArray[np.int64]  # ids [n], 0 … 2**64 − 1

TOKEN_BYTES = 8
_TOKEN = np.dtype("<u8")


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

    def cut(self, tokens: Tokens) -> tuple[tuple[PageKey, ...], PageKey]:
        """Tokens [n] → (page keys of the whole pages, the short one of the tail; empty if there is none).

        :class:`InvalidInput` for what is no list of ids of 64 bits.
        """
        P = self.page_size
        num_keys, data = self.count(len(tokens)), token_bytes(tokens)
        step, size = P * TOKEN_BYTES, (P + self.overlap) * TOKEN_BYTES
        whole = tuple(data[start : start + size] for start in range(0, num_keys // P * step, step))
        return whole, data[len(whole) * step :] if num_keys % P else b""

    def length(self, page_key: PageKey) -> int:
        """Keys of a page: P, or fewer in a tail."""
        return self.count(len(page_key) // TOKEN_BYTES)

    def common(self, one: PageKey, other: PageKey) -> int:
        """How many first keys two pages share."""
        size = min(len(one), len(other))
        different = np.flatnonzero(tokens_of(one[:size]) != tokens_of(other[:size]))
        return self.count(int(different[0]) if len(different) else size // TOKEN_BYTES)


def token_bytes(tokens: Tokens) -> bytes:
    """Ids [n] as they stand in page keys, 8 bytes each."""
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype not in (np.uint64, np.int64):
            raise _no_tokens(f"an array of {tokens.dtype}, of {tokens.ndim} dimensions")
        if tokens.dtype == np.int64 and len(tokens) and int(tokens.min()) < 0:
            raise _no_tokens(f"{int(tokens.min())} among them")
        return tokens.astype(_TOKEN, copy=False).tobytes()
    try:
        return np.array(array("Q", tokens), dtype=_TOKEN).tobytes()
    except (TypeError, OverflowError) as error:
        raise _no_tokens(str(error)) from error


def tokens_of(page_key: PageKey) -> npt.NDArray[np.uint64]:
    """The ids that a page key is made of; not to be written to."""
    return np.frombuffer(page_key, dtype=_TOKEN)


def _no_tokens(received: str) -> InvalidInput:
    return InvalidInput(
        "tokens", expected="integers 0 … 2**64 − 1, in a list or in an array of 64 bits", received=received
    )
