"""The ``torch.distributed`` backend ``lockstep``: what torch calls, turned into arrivals at a meeting."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from refmodel.collectives import Call, current_call
from refmodel.errors import InvalidInput, Where
from sim.failures import WorldUnavailable
from sim.lockstep import exchange

BACKEND = "lockstep"

# torch's name of a default group, in every world.
DEFAULT_GROUP = "0"


class Signature(NamedTuple):
    """What a rank came to a meeting for. Must be equal on all ranks (V6)."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None: a barrier sends nothing
    detail: str  # of a reduction its name, of a broadcast its root, …
    site: str | None  # None: not issued through refmodel.collectives


class Arrival(NamedTuple):
    """One rank at a meeting, with the tensors it brought: what is sent, and where results go."""

    signature: Signature
    sent: torch.Tensor | None
    outputs: Any
    call: Call | None


# Does a collective for all ranks, whose arrivals it gets in rank order.
Perform = Callable[[list[Arrival]], None]
Meet = Callable[[int, Arrival, Perform], None]


class LockstepGroup(dist.ProcessGroup):
    """The ranks of one run, as one of them sees it. ``torch.distributed`` calls its methods.

    ``meet(rank, arrival, perform)`` returns when all ranks have met and ``perform`` is done.
    """

    def __init__(self, rank: int, size: int, meet: Meet) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub lacks this constructor
        self._rank = rank
        self._size = size
        self._arrive = meet

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return DEFAULT_GROUP

    def getBackendName(self) -> str:  # noqa: N802  # torch's spelling
        return BACKEND

    # The stubs give every method several signatures; torch.distributed uses these.

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> None:  # type: ignore[override]
        self._refuse_async("all_gather", opts)
        ((parts,), (sent,)) = outputs, inputs
        ragged = [tuple(part.shape) for part in parts if part.shape != sent.shape]
        if len(parts) != self._size or ragged:
            raise InvalidInput(
                "output list of all_gather",
                expected=f"{self._size} tensors of shape {list(sent.shape)}",
                received=f"{len(parts)} tensors, shapes {[list(part.shape) for part in parts]}",
                where=Where(rank=self._rank),
            )
        self._meet("all_gather", _gather_lists, sent, parts, detail="list")

    def all_gather_single(self, output: Any, sent: Any, opts: Any = None) -> None:  # type: ignore[override]
        self._refuse_async("all_gather", opts)
        if output.numel() != self._size * sent.numel() or output.dtype != sent.dtype:
            raise InvalidInput(
                "output of all_gather",
                expected=f"{self._size} times {list(sent.shape)} {sent.dtype}",
                received=f"{list(output.shape)} {output.dtype}",
                where=Where(rank=self._rank),
            )
        self._meet("all_gather", _gather, sent, output)

    # Its name until torch 2.12.
    _allgather_base = all_gather_single  # type: ignore[assignment]

    def allreduce(self, tensors: Any, opts: Any = None) -> None:  # type: ignore[override]
        self._refuse_async("all_reduce", opts)
        name = exchange.fold_name(opts.reduceOp)
        if not exchange.knows_fold(name):
            raise _unsupported(f"all_reduce with {name}")
        (tensor,) = tensors
        self._meet("all_reduce", partial(_all_reduce, name=name), tensor, detail=name)

    def broadcast(self, tensors: Any, opts: Any = None) -> None:  # type: ignore[override]
        self._refuse_async("broadcast", opts)
        (tensor,) = tensors
        root = opts.rootRank
        self._meet("broadcast", partial(_broadcast, root=root), tensor, detail=f"from {root}")

    def barrier(self, opts: Any = None) -> None:  # type: ignore[override]
        self._refuse_async("barrier", opts)
        self._meet("barrier", _nothing, None)

    def _meet(
        self, kind: str, perform: Perform, sent: torch.Tensor | None, outputs: Any = None, detail: str = ""
    ) -> None:
        call = current_call()
        site = None if call is None else call.site
        shape, dtype = ((), None) if sent is None else (sent.shape, sent.dtype)
        arrival = Arrival(Signature(kind, shape, dtype, detail, site), sent, outputs, call)
        self._arrive(self._rank, arrival, perform)

    @staticmethod
    def _refuse_async(kind: str, opts: Any) -> None:
        if opts is not None and getattr(opts, "asyncOp", False):
            raise _unsupported(f"{kind} with async_op=True")


def _refusing(name: str) -> Callable[..., None]:
    def refuse(self: LockstepGroup, *args: object, **kwargs: object) -> None:
        raise _unsupported(name)

    return refuse


def _unsupported(what: str) -> WorldUnavailable:
    return WorldUnavailable(
        "a collective on lockstep",
        expected="all_gather, all_reduce, broadcast or barrier, not asynchronous",
        received=what,
        fix="Run this program on World.gloo.",
    )


# Left alone, these would fail inside torch with a message about a missing backend.
for _name in (
    "all_gather_single_coalesced",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce_coalesced",
    "all_to_all_single",
    "alltoall",
    "alltoall_base",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "_reduce_scatter_base",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
    "split_group",
    "merge_remote_group",
    "_start_coalescing",
):
    setattr(LockstepGroup, _name, _refusing(_name))


def _gather(arrivals: list[Arrival]) -> None:
    exchange.gather(_sent(arrivals), [arrival.outputs for arrival in arrivals])


def _gather_lists(arrivals: list[Arrival]) -> None:
    exchange.gather_lists(_sent(arrivals), [arrival.outputs for arrival in arrivals])


def _all_reduce(arrivals: list[Arrival], *, name: str) -> None:
    exchange.all_reduce(_sent(arrivals), name)


def _broadcast(arrivals: list[Arrival], *, root: int) -> None:
    exchange.broadcast(_sent(arrivals), root)


def _nothing(arrivals: list[Arrival]) -> None:
    pass


def _sent(arrivals: list[Arrival]) -> list[torch.Tensor]:
    return [arrival.sent for arrival in arrivals if arrival.sent is not None]


def _create_group(store: object, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """What torch calls for ``init_process_group("lockstep")`` and ``new_group``."""
    raise WorldUnavailable(
        "a process group on lockstep",
        expected="the default group, which World.lockstep makes",
        received=f"a new group of {size} ranks",
        fix="Run the program with World.lockstep(size).run(program); it receives its group.",
    )


dist.Backend.register_backend(BACKEND, _create_group, devices=["cpu", "cuda"])
