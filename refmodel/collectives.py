"""The collectives the model needs, over an explicit group, each with a call-site name; and the ledger (V6).

Every rank issues the same ordered list of calls, also when it has no rows. A World writes each :class:`Call`
of a rank into its ledger; a run compares the ledgers of all ranks and names the first difference.

This module and ``sim.surface.operations`` alone know how torch names its collectives: 2.13 renamed
``all_gather_into_tensor`` to ``all_gather_single``; 2.11 and 2.12 know only the former.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.distributed as dist

from refmodel.errors import InvalidInput, Where
from refmodel.layout.rows import buffer_rows, pad_rows, trim_rows


class Call(NamedTuple):
    """One call as one rank issued it, a collective or a message from rank to rank.

    Shape, type and bytes are those of the tensors that the rank sends, or receives where it sends none.
    """

    sequence: int  # 0, 1, … in the order of this rank
    site: str  # who called, e.g. "kv.view"; "ring.py:88" where the program gives no name
    kind: str  # "all_gather"
    shape: tuple[int, ...]  # of the first tensor; padded, where contributions travel padded
    dtype: str  # as it travels, e.g. "uint8" for fp8; "" if there is no tensor
    group: str
    group_size: int
    num_bytes: int  # of all tensors
    detail: str = ""  # of a reduction its name, of a broadcast its root, of a message its peer, …
    num_tensors: int = 1
    is_named: bool = True  # the site is a name that the program gave, so all ranks must give it
    is_even: bool = True  # a collective that requires one shape on all ranks
    is_message: bool = False  # from rank to rank: no business of the others

    @property
    def key(self) -> Hashable:
        """What V6 requires to be equal on all ranks of the group, for a collective.

        Without the sequence, in which calls on smaller groups count. Without the site where it is a line
        of the program: a root may well scatter in one line and the others receive in another.
        """
        site = self.site if self.is_named else None
        shape = self.shape if self.is_even else None
        return site, self.kind, self.detail, shape, self.dtype, self.group, self.group_size

    @property
    def what(self) -> str:
        """Kind, detail, shape and type: "all_reduce SUM [4] float32"."""
        detail = f" {self.detail}" if self.detail else ""
        tensors = f"{list(self.shape)} {self.dtype}" if self.num_tensors else "nothing"
        return f"{self.kind}{detail} {tensors}"

    def __str__(self) -> str:
        return f"#{self.sequence} {self.site}: {self.what} on group {self.group}"


# Not state of the module: a context variable, empty unless this thread is within a call below.
_site: ContextVar[str | None] = ContextVar("cpkv_site", default=None)


def current_site() -> str | None:
    """The name of the call being issued in this thread; None if the program gave none."""
    return _site.get()


@contextmanager
def at_site(site: str | None) -> Iterator[None]:
    """Within the block, calls issued in this thread have this name.

    ``with at_site("loss"): dist.all_reduce(…)``
    """
    outer = _site.set(site)
    try:
        yield
    finally:
        _site.reset(outer)


def rank_and_size(group: dist.ProcessGroup) -> tuple[int, int]:
    """This process's rank in ``group`` and the group's size: never those of another group (split-14)."""
    return group.rank(), group.size()


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where the tensors of calls on ``group`` should be: the device it is bound to, else the CPU."""
    return group.bound_device_id or torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class PendingRows:
    """A gather that is under way. The buffers belong to it until :meth:`wait`."""

    _work: dist.Work
    _gathered: torch.Tensor
    _sent: torch.Tensor  # not to be freed while it travels
    _dtype: torch.dtype

    def wait(self) -> torch.Tensor:
        """The buffers of all ranks, [W × max(counts), …]."""
        self._work.wait()
        return self._gathered.view(self._dtype)


def start_gather(
    rows: torch.Tensor, counts: Sequence[int], *, group: dist.ProcessGroup, site: str
) -> PendingRows:
    """Begin what :func:`gather_buffers` does; every rank may compute before it waits (V5)."""
    sent, gathered = _buffers(rows, counts, group, site)
    work = _all_gather_single(gathered, sent, group=group, site=site, async_op=True)
    return PendingRows(cast("dist.Work", work), gathered, sent, rows.dtype)


def gather_buffers(
    rows: torch.Tensor, counts: Sequence[int], *, group: dist.ProcessGroup, site: str
) -> torch.Tensor:
    """The buffers of all ranks, [W × max(counts), …], on every rank: each rank's rows, then padding.

    ``rows`` [counts[rank], …], any dtype; ``counts`` [W] is shared metadata, equal on all ranks, zeros
    allowed. Contributions travel padded to the longest, since no backend gathers uneven rows in one call on
    every device, and gloo returns early on a rank that sends nothing (view-08).
    """
    sent, gathered = _buffers(rows, counts, group, site)
    _all_gather_single(gathered, sent, group=group, site=site)
    return gathered.view(rows.dtype)


def all_gather_rows(
    rows: torch.Tensor, counts: Sequence[int], *, group: dist.ProcessGroup, site: str
) -> torch.Tensor:
    """Rows of rank 0, then of rank 1, … [sum(counts), …]: :func:`gather_buffers` without the padding."""
    return trim_rows(gather_buffers(rows, counts, group=group, site=site), counts)


def _buffers(
    rows: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup, site: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank sends, and what it receives."""
    rank, size = rank_and_size(group)
    if len(counts) != size or rows.shape[0] != counts[rank]:
        raise InvalidInput(
            "rows to gather",
            expected=f"{size} counts, and {counts[rank] if rank < len(counts) else '?'} rows on this rank",
            received=f"{len(counts)} counts and {rows.shape[0]} rows",
            where=Where(rank=rank, site=site),
            fix="Take the counts from the plan; every rank must use the same ones.",
        )
    sent = _as_wire(pad_rows(rows, buffer_rows(counts)))
    return sent, sent.new_empty((size * sent.shape[0], *sent.shape[1:]))


def _as_wire(rows: torch.Tensor) -> torch.Tensor:
    """fp8 travels as bytes: gloo and older NCCL refuse the dtype itself (view-08)."""
    return rows.view(torch.uint8) if "float8" in str(rows.dtype) else rows


def _all_gather_single(
    output: torch.Tensor, sent: torch.Tensor, *, group: dist.ProcessGroup, site: str, async_op: bool = False
) -> object:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    outer = _site.set(site)
    try:
        return cast("Callable[..., object]", gather)(output, sent, group=group, async_op=async_op)
    finally:
        _site.reset(outer)
