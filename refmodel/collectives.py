"""The collectives the model needs, over an explicit group, each with a call-site name; and the ledger (V6).

Every rank issues the same ordered list of calls, also when it has no rows. Each call is written into the
rank's :class:`Ledger`; a run compares the ledgers of all ranks and names the first difference.

This module alone knows how torch names its collectives: 2.13 renamed ``all_gather_into_tensor`` to
``all_gather_single``; 2.11 and 2.12 know only the former.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod
from typing import cast

import torch
import torch.distributed as dist

from refmodel.errors import InvalidInput, Where
from refmodel.layout.rows import buffer_rows, pad_rows, trim_rows


@dataclass(frozen=True, slots=True)
class Call:
    """One collective as one rank issued it. Equal on all ranks when V6 holds."""

    sequence: int  # 0, 1, … in the order of this rank
    site: str  # who called, e.g. "kv.view"
    kind: str  # "all_gather"
    shape: tuple[int, ...]  # of this rank's padded contribution
    dtype: str  # as it travels, e.g. "uint8" for fp8
    group: str
    group_size: int
    num_bytes: int  # of this rank's padded contribution

    def __str__(self) -> str:
        shape = list(self.shape)
        return f"#{self.sequence} {self.site}: {self.kind} {shape} {self.dtype} on group {self.group}"


@dataclass(slots=True)
class Ledger:
    """What one rank called, in order. ``listener`` hears of each call before it is issued."""

    calls: list[Call] = field(default_factory=list)
    listener: Callable[[Call], None] | None = None

    def record(self, site: str, kind: str, sent: torch.Tensor, group: dist.ProcessGroup) -> Call:
        call = Call(
            sequence=len(self.calls),
            site=site,
            kind=kind,
            shape=tuple(sent.shape),
            dtype=str(sent.dtype).removeprefix("torch."),
            group=group.group_name,
            group_size=group.size(),
            num_bytes=prod(sent.shape) * sent.element_size(),
        )
        self.calls.append(call)
        if self.listener is not None:
            self.listener(call)
        return call


# Not state of the module: a context variable, empty in every thread until a World opens a ledger there.
_ledger: ContextVar[Ledger | None] = ContextVar("cpkv_ledger", default=None)
_call: ContextVar[Call | None] = ContextVar("cpkv_call", default=None)


@contextmanager
def recording(ledger: Ledger) -> Iterator[Ledger]:
    """Within the block, in this thread, calls are written into ``ledger``."""
    token = _ledger.set(ledger)
    try:
        yield ledger
    finally:
        _ledger.reset(token)


def current_call() -> Call | None:
    """The call being issued in this thread, for a backend that wants to know its site; else None."""
    return _call.get()


@contextmanager
def _issuing(site: str, kind: str, sent: torch.Tensor, group: dist.ProcessGroup) -> Iterator[None]:
    ledger = _ledger.get()
    if ledger is None:
        yield
        return
    token = _call.set(ledger.record(site, kind, sent, group))
    try:
        yield
    finally:
        _call.reset(token)


def rank_and_size(group: dist.ProcessGroup) -> tuple[int, int]:
    """This process's rank in ``group`` and the group's size: never those of another group (split-14)."""
    return group.rank(), group.size()


def all_gather_rows(
    rows: torch.Tensor, counts: Sequence[int], *, group: dist.ProcessGroup, site: str
) -> torch.Tensor:
    """Rows of rank 0, then of rank 1, …, on every rank.

    ``rows`` [counts[rank], …], any dtype; ``counts`` [W] is shared metadata, equal on all ranks, zeros
    allowed. Returns [sum(counts), …]. Contributions travel padded to the longest, since no backend gathers
    uneven rows in one call on every device, and gloo returns early on a rank that sends nothing (view-08).
    """
    rank, size = rank_and_size(group)
    if len(counts) != size or rows.shape[0] != counts[rank]:
        raise InvalidInput(
            "rows to gather",
            expected=f"{size} counts, and {counts[rank] if rank < len(counts) else '?'} rows on this rank",
            received=f"{len(counts)} counts and {rows.shape[0]} rows",
            where=Where(rank=rank, site=site),
            fix="Take the counts from the plan; every rank must use the same ones.",
        )
    padded = pad_rows(rows, buffer_rows(counts))
    wire = _as_wire(padded)
    gathered = wire.new_empty((size * wire.shape[0], *wire.shape[1:]))
    with _issuing(site, "all_gather", wire, group):
        _all_gather_single(gathered, wire, group=group)
    return trim_rows(gathered.view(padded.dtype), counts)


def _as_wire(rows: torch.Tensor) -> torch.Tensor:
    """fp8 travels as bytes: gloo and older NCCL refuse the dtype itself (view-08)."""
    return rows.view(torch.uint8) if "float8" in str(rows.dtype) else rows


def _all_gather_single(output: torch.Tensor, sent: torch.Tensor, *, group: dist.ProcessGroup) -> None:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    cast("Callable[..., object]", gather)(output, sent, group=group)
