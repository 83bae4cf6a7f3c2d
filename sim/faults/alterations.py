"""An operation made into another: another kind, shape or type, or other bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from sim.surface.operations import BUILD, Operation

_OTHER_DTYPE = {
    torch.float32: torch.float64,
    torch.float64: torch.float32,
    torch.int64: torch.int32,
    torch.int32: torch.int64,
    torch.uint8: torch.int8,
    torch.int8: torch.uint8,
}


def another_kind(operation: Operation) -> Operation:
    """A broadcast from rank 0 of the group; for a broadcast, a barrier."""
    if operation.kind == "broadcast":
        options: Any = dist.BarrierOptions()
        options.asyncOp = operation.is_async
        return Operation("barrier", "barrier", (options,), is_async=operation.is_async)
    tensor = operation.tensors[0].clone() if operation.tensors else torch.zeros(1)
    options = dist.BroadcastOptions()
    options.rootRank, options.asyncOp = 0, operation.is_async
    # Whether this rank sends or receives makes no difference to how torch is called.
    build, method = BUILD["broadcast"]
    return build(0, 1, method, ([tensor], options))


def another_shape(operation: Operation) -> Operation:
    """All tensors twice as long, so that they still fit each other."""
    return _with_tensors(operation, lambda tensor: torch.cat([torch.atleast_1d(tensor)] * 2))


def another_dtype(operation: Operation) -> Operation:
    """All tensors of another type, which every backend carries."""
    return _with_tensors(operation, lambda tensor: tensor.to(_OTHER_DTYPE.get(tensor.dtype, torch.float32)))


def other_values(operation: Operation) -> Operation:
    """What is sent with the lowest bit of each element turned."""
    written = {id(tensor) for tensor in operation.received}

    def turned(tensor: torch.Tensor) -> torch.Tensor:
        # What is sent may be what is written as well: then the program expects its result there.
        sent = tensor if id(tensor) in written else tensor.clone(memory_format=torch.contiguous_format)
        with torch.no_grad():
            sent.copy_(_lowest_bits_turned(sent))
        return sent

    return _with_tensors(operation, turned, of=operation.sent)


def _lowest_bits_turned(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.bool:
        return ~tensor
    flat = tensor.contiguous().clone().view(-1)
    low = flat.view(torch.uint8).view(-1, tensor.element_size())[:, 0]  # little-endian
    low ^= 1
    return flat.view(tensor.shape)


ALTER: dict[str, Callable[[Operation], Operation]] = {
    "kind": another_kind,
    "shape": another_shape,
    "dtype": another_dtype,
    "values": other_values,
}


def _with_tensors(
    operation: Operation,
    alter: Callable[[torch.Tensor], torch.Tensor],
    *,
    of: tuple[torch.Tensor, ...] | None = None,
) -> Operation:
    """The operation with its tensors altered, wherever they are in its arguments; default: all of them."""
    chosen = (*operation.sent, *operation.received) if of is None else of
    altered = {id(tensor): alter(tensor) for tensor in {id(tensor): tensor for tensor in chosen}.values()}

    def replaced(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return altered.get(id(value), value)
        return type(value)(map(replaced, value)) if isinstance(value, (list, tuple)) else value

    return operation._replace(
        arguments=tuple(map(replaced, operation.arguments)),
        sent=tuple(map(replaced, operation.sent)),
        received=tuple(map(replaced, operation.received)),
    )
