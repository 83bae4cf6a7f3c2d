"""What torch calls on a process group, as one value, whatever the method: an :class:`Operation`.

torch has some twenty methods, under two names each since 2.13, for eleven kinds of calls. The functions here
take a method's arguments as torch passes them and say what they mean: which tensors are sent, which are
written, and how. ``BUILD`` finds the function by the method's name.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch.distributed as dist

from sim.surface.arguments import (
    Tensors,
    as_tuple,
    check_multiples,
    check_parts,
    of_each,
    peer_detail,
    read_async,
    read_fold,
    read_root,
    read_splits,
    refused,
    shown,
)


class Operation(NamedTuple):
    """One call of one rank on one group. Ranks are those of the group.

    ``getattr(group, method)(*arguments)`` issues it on a group of torch's own.
    """

    kind: str  # "all_gather", "all_reduce", …, "send", "recv"
    method: str  # as this version of torch names it, e.g. "all_gather_single"
    arguments: tuple[Any, ...]
    sent: Tensors = ()
    received: Tensors = ()  # what is written, in place of a result
    is_async: bool = False  # what is written is there after ``wait()`` of the work that is returned
    detail: str = ""  # in words, what all ranks must agree on besides kind, shape and type
    fold: str = ""  # the reduction, "SUM"
    root: int = -1  # of broadcast, reduce, gather, scatter
    peer: int = -1  # of send and recv; -1: from any rank
    tag: int = 0  # of send and recv
    is_whole: bool = True  # the ranks' parts are one tensor, one after the other; else a list
    splits: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # rows sent to, received from each rank
    is_even: bool = True  # whether the shape sent must be the same on all ranks
    is_message: bool = False  # from rank to rank
    is_lost: bool = False  # issued, and then carried nowhere

    @property
    def tensors(self) -> Tensors:
        """What is sent; what is received, where nothing is."""
        return self.sent or self.received


# A function here: (rank, size, method, arguments of the method) -> Operation.
Build = Callable[[int, int, str, tuple[Any, ...]], Operation]


def all_gather(rank: int, size: int, method: str, arguments: tuple[Any, ...]) -> Operation:
    """``(outputs[i][part], inputs[i], options)``, with one input."""
    (parts,), (sent,) = arguments[0], arguments[1]
    if len(parts) != size:
        raise refused("output list of all_gather", f"{size} tensors", f"{len(parts)}", rank)
    uneven = [part for part in parts if part.shape != sent.shape]
    if parts[rank].shape != sent.shape or any(part.dtype != sent.dtype for part in parts):
        raise refused(
            "output list of all_gather",
            f"as entry {rank} a tensor like {shown(sent)}, all of that type",
            ", ".join(shown(part) for part in parts),
            rank,
        )
    # Uneven parts: all ranks must expect the same ones, whatever each of them sends.
    detail = f"list{of_each(parts)}" if uneven else "list"
    return Operation(
        "all_gather",
        method,
        arguments,
        (sent,),
        tuple(parts),
        read_async(method, arguments, 2),
        detail,
        is_whole=False,
        is_even=not uneven,
    )


def all_gather_single(rank: int, size: int, method: str, arguments: tuple[Any, ...]) -> Operation:
    """``(output, input, options)``."""
    output, sent = arguments[0], arguments[1]
    if output.numel() != size * sent.numel() or output.dtype != sent.dtype:
        raise refused("output of all_gather", f"{size} times {shown(sent)}", shown(output), rank)
    return Operation("all_gather", method, arguments, (sent,), (output,), read_async(method, arguments, 2))


def all_gather_coalesced(rank: int, size: int, method: str, arguments: tuple[Any, ...]) -> Operation:
    """``(outputs[part][i], inputs[i], options)``."""
    lists, sent = arguments[0], tuple(arguments[1])
    shapes = [tensor.shape for tensor in sent]
    if len(lists) != size or any([tensor.shape for tensor in parts] != shapes for parts in lists):
        raise refused(
            "output lists of all_gather",
            f"{size} lists, each like what is sent, {[list(shape) for shape in shapes]}",
            f"{[[list(tensor.shape) for tensor in parts] for parts in lists]}",
            rank,
        )
    is_async = read_async(method, arguments, 2)
    received = tuple(chain.from_iterable(lists))
    return Operation(
        "all_gather",
        method,
        arguments,
        sent,
        received,
        is_async,
        f"coalesced list{of_each(sent)}",
        is_whole=False,
    )


def all_gather_single_coalesced(rank: int, size: int, method: str, arguments: tuple[Any, ...]) -> Operation:
    """``(outputs[i], inputs[i], options)``."""
    outputs, sent = tuple(arguments[0]), tuple(arguments[1])
    check_multiples("outputs of all_gather", outputs, sent, size, rank)
    is_async = read_async(method, arguments, 2)
    return Operation("all_gather", method, arguments, sent, outputs, is_async, f"coalesced{of_each(sent)}")


def all_reduce(rank: int, size: int, method: str, arguments: tuple[Any, ...]) -> Operation:
    """``(tensors, options)``; several tensors where coalesced."""
    tensors = tuple(arguments[0])
    is_async = read_async(method, arguments, 1)
    fold = read_fold(arguments, 1, tensors, rank)
    detail = fold + of_each(tensors)
    return Operation("all_reduce", method, arguments, tensors, tensors, is_async, detail, fold)


def broadcast(rank: int, size: int, method: str, arguments: tuple[Any, ...]) -> Operation:
    """``([tensor], options)``."""
    tensors = tuple(arguments[0])
    is_async = read_async(method, arguments, 1)
    root = read_root(arguments, 1)
    sent, received = (tensors, ()) if rank == root else ((), tensors)
    return Operation("broadcast", method, arguments, sent, received, is_async, f"from {root}", root=root)


def reduce(rank: int, size: int, method: str, arguments: tuple[Any, ...]) -> Operation:
    """``([tensor], options)``."""
    tensors = tuple(arguments[0])
    is_async = read_async(method, arguments, 1)
    fold, root = read_fold(arguments, 1, tensors, rank), read_root(arguments, 1)
    received = tensors if rank == root else ()
    detail = f"{fold} to {root}"
    return Operation("reduce", method, arguments, tensors, received, is_async, detail, root=root, fold=fold)


def gather(rank: int, size: int, method: str, arguments: tuple[Any, ...]) -> Operation:
    """``([parts] on the root and [] elsewhere, [tensor], options)``."""
    (sent,) = arguments[1]
    is_async = read_async(method, arguments, 2)
    root = read_root(arguments, 2)
    received = tuple(arguments[0][0]) if rank == root else ()
    if rank == root:
        check_parts("output list of gather", received, sent, size, rank)
    return Operation(
        "gather", method, arguments, (sent,), received, is_async, f"to {root}", root=root, is_whole=False
    )


def scatter(rank: int, size: int, method: str, arguments: tuple[Any, ...]) -> Operation:
    """``([tensor], [parts] on the root and [] elsewhere, options)``."""
    (received,) = arguments[0]
    is_async = read_async(method, arguments, 2)
    root = read_root(arguments, 2)
    sent = tuple(arguments[1][0]) if rank == root else ()
    if rank == root:
        check_parts("input list of scatter", sent, received, size, rank)
    return Operation(
        "scatter", method, arguments, sent, (received,), is_async, f"from {root}", root=root, is_whole=False
    )


def reduce_scatter(rank: int, size: int, method: str, arguments: tuple[Any, ...]) -> Operation:
    """``([output], [parts], options)``."""
    (output,), (parts,) = arguments[0], arguments[1]
    sent = tuple(parts)
    is_async = read_async(method, arguments, 2)
    fold = read_fold(arguments, 2, sent, rank)
    uneven = any(part.shape != sent[0].shape for part in sent)
    if len(sent) != size or sent[rank].shape != output.shape or sent[rank].dtype != output.dtype:
        raise refused(
            "input list of reduce_scatter",
            f"{size} tensors, as entry {rank} one like {shown(output)}",
            ", ".join(shown(part) for part in sent),
            rank,
        )
    shapes = of_each(sent) if uneven else ""
    return Operation(
        "reduce_scatter",
        method,
        arguments,
        sent,
        (output,),
        is_async,
        f"{fold} list{shapes}",
        fold=fold,
        is_whole=False,
    )


def reduce_scatter_single(rank: int, size: int, method: str, arguments: tuple[Any, ...]) -> Operation:
    """``(output, input, options)``; lists of both where coalesced."""
    outputs, sent = as_tuple(arguments[0]), as_tuple(arguments[1])
    is_async = read_async(method, arguments, 2)
    fold = read_fold(arguments, 2, sent, rank)
    check_multiples("input of reduce_scatter", sent, outputs, size, rank)
    detail = fold + of_each(sent)
    return Operation("reduce_scatter", method, arguments, sent, outputs, is_async, detail, fold)


def all_to_all_single(rank: int, size: int, method: str, arguments: tuple[Any, ...]) -> Operation:
    """``(output, input, output_splits, input_splits, options)``; no splits means equal ones."""
    output, sent = arguments[0], arguments[1]
    splits = (
        read_splits("input", sent, arguments[3], size, rank),
        read_splits("output", output, arguments[2], size, rank),
    )
    if output.dtype != sent.dtype or output.shape[1:] != sent.shape[1:]:
        raise refused("output of all_to_all", f"rows like those of {shown(sent)}", shown(output), rank)
    is_async = read_async(method, arguments, 4)
    # How many rows go where is each rank's own affair.
    detail = f"rows of {list(sent.shape[1:])}"
    return Operation(
        "all_to_all", method, arguments, (sent,), (output,), is_async, detail, splits=splits, is_even=False
    )


def all_to_all(rank: int, size: int, method: str, arguments: tuple[Any, ...]) -> Operation:
    """``(outputs[part], inputs[part], options)``."""
    outputs, sent = tuple(arguments[0]), tuple(arguments[1])
    if len(outputs) != size or len(sent) != size:
        received = f"{len(sent)} to send and {len(outputs)} to receive"
        raise refused("lists of all_to_all", f"{size} tensors each", received, rank)
    is_async = read_async(method, arguments, 2)
    return Operation(
        "all_to_all", method, arguments, sent, outputs, is_async, "list", is_whole=False, is_even=False
    )


def barrier(rank: int, size: int, method: str, arguments: tuple[Any, ...]) -> Operation:
    """``(options)``."""
    return Operation("barrier", method, arguments, is_async=read_async(method, arguments, 0))


def monitored_barrier(rank: int, size: int, method: str, arguments: tuple[Any, ...]) -> Operation:
    """``(timeout, wait_all_ranks)``."""
    return Operation("barrier", method, arguments, detail="monitored")


def send(rank: int, size: int, method: str, arguments: tuple[Any, ...]) -> Operation:
    """``([tensor], peer, tag)``. torch waits, or lets the program do so."""
    tensors, peer, tag = arguments
    detail = peer_detail("to", peer, tag)
    return Operation(
        "send", method, arguments, tuple(tensors), (), True, detail, peer=peer, tag=tag, is_message=True
    )


def recv(rank: int, size: int, method: str, arguments: tuple[Any, ...]) -> Operation:
    """``([tensor], peer, tag)``."""
    tensors, peer, tag = arguments
    return Operation(
        "recv",
        method,
        arguments,
        (),
        tuple(tensors),
        True,
        peer_detail("from", peer, tag),
        peer=peer,
        tag=tag,
        is_message=True,
    )


def recv_anysource(rank: int, size: int, method: str, arguments: tuple[Any, ...]) -> Operation:
    """``([tensor], tag)``."""
    tensors, tag = arguments
    detail = peer_detail("from", "any", tag)
    return Operation("recv", method, arguments, (), tuple(tensors), True, detail, tag=tag, is_message=True)


# The methods of torch's groups. Two names in a line: that of 2.13, and that until then.
_METHODS: list[tuple[Build, tuple[str, ...]]] = [
    (all_gather, ("allgather",)),
    (all_gather_single, ("all_gather_single", "_allgather_base")),
    (all_gather_coalesced, ("allgather_coalesced",)),
    (all_gather_single_coalesced, ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")),
    (all_reduce, ("allreduce",)),
    (all_reduce, ("allreduce_coalesced",)),
    (broadcast, ("broadcast",)),
    (reduce, ("reduce",)),
    (gather, ("gather",)),
    (scatter, ("scatter",)),
    (reduce_scatter, ("reduce_scatter",)),
    (reduce_scatter_single, ("reduce_scatter_single", "_reduce_scatter_base")),
    (reduce_scatter_single, ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")),
    (all_to_all_single, ("all_to_all_single", "alltoall_base")),
    (all_to_all, ("alltoall",)),
    (barrier, ("barrier",)),
    (monitored_barrier, ("monitored_barrier",)),
    (send, ("send",)),
    (recv, ("recv",)),
    (recv_anysource, ("recv_anysource",)),
]


def _own_name(names: tuple[str, ...]) -> str:
    return next((name for name in names if hasattr(dist.ProcessGroup, name)), names[0])


# By every name that any version calls: its meaning, and the name that this version's groups have.
BUILD: dict[str, tuple[Build, str]] = {
    name: (build, _own_name(names)) for build, names in _METHODS for name in names
}
