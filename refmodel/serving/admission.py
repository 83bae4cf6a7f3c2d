"""How many requests go into a batch, and where a chunk ends (laws G1–G4).

Only tokens and caps count. Whether there are pages for them is the allocator's answer, not an estimate (G3).

>>> caps = Caps(max_requests=4, max_tokens=4096)
>>> admit([1000, 2000, 900, 65], caps, 64, batch_flag=True, shared_kv=True)
3
>>> admit([9000, 10], caps, 64, batch_flag=True, shared_kv=True)
1
>>> chunk_end(prefix=70, remaining=300, chunk_size=128, page_size=64)
192
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from refmodel.errors import InvalidInput
from refmodel.layout.geometry import at_least, coverage


@dataclass(frozen=True, slots=True)
class Caps:
    """Optional caps on a batch (G2)."""

    max_requests: int | None = None
    max_tokens: int | None = None  # sum of page-aligned extends

    def __post_init__(self) -> None:
        for name, value in (("max_requests", self.max_requests), ("max_tokens", self.max_tokens)):
            if value is not None:
                at_least(1, value, f"cap {name}")


def admit(waiting: Sequence[int], caps: Caps, page_size: int, *, batch_flag: bool, shared_kv: bool) -> int:
    """How many of the requests that wait go into the next batch: the first so many, none is passed over.

    ``waiting``: new tokens of each request, >= 1, in the order of their turn. The first is always in, however
    large: a hard cap would keep it waiting for ever (G2). Without ``batch_flag`` it is the only one; the flag
    widens shared-KV batches and no others (G1).
    """
    if not waiting:
        return 0
    aligned = [coverage(at_least(1, tokens, "new tokens of a request"), page_size) for tokens in waiting]
    most = len(waiting) if batch_flag and shared_kv else 1
    if caps.max_requests is not None:
        most = min(most, caps.max_requests)
    if caps.max_tokens is None:
        return most
    fitting = sum(total <= caps.max_tokens for total in accumulate(aligned))
    return max(1, min(most, fitting))


def chunk_end(prefix: int, remaining: int, chunk_size: int, page_size: int) -> int:
    """Token at which the next chunk of a request ends: all that remains, or an absolute page multiple (G4).

    ``prefix`` tokens are in cache, ``remaining`` >= 1 are to come, at most ``chunk_size`` of them now.
    :class:`InvalidInput` for a chunk size below a page: it might never reach the next multiple.
    """
    at_least(0, prefix, "prefix of a chunk")
    at_least(1, remaining, "remaining tokens of a request")
    if at_least(1, chunk_size, "chunk size") < page_size:
        raise InvalidInput("chunk size", expected=f"at least a page, {page_size}", received=chunk_size)
    if remaining <= chunk_size:
        return prefix + remaining
    return (prefix + chunk_size) // page_size * page_size
