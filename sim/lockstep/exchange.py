"""What each collective does to the tensors of all ranks, in rank order. No ranks, no threads, no groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch

Tensors = Sequence[torch.Tensor]

# Folded in rank order, so that the bits of a sum do not depend on who arrived when.
_FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,  # and divided afterwards
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def fold_name(op: Any) -> str:
    """The name of a ``dist.ReduceOp``, "SUM"."""
    return str(op.op.name)


def knows_fold(name: str) -> bool:
    """Whether :func:`all_reduce` performs the reduction of this name."""
    return name in _FOLDS


def gather(sent: Tensors, outputs: Tensors) -> None:
    """Every output becomes the elements of all of ``sent``, one after the other; any dtype, as bytes."""
    whole = torch.stack(list(sent))
    for output in outputs:
        output.copy_(whole.view(output.shape))


def gather_lists(sent: Tensors, outputs: Sequence[Tensors]) -> None:
    """Entry r of every list becomes what rank r sent."""
    for parts in outputs:
        for part, source in zip(parts, sent, strict=True):
            part.copy_(source)


def all_reduce(tensors: Tensors, name: str) -> None:
    """All become their fold, ``((t0 op t1) op t2) op …``."""
    total = reduce(_FOLDS[name], tensors)
    if name == "AVG":
        total = total / len(tensors)
    for tensor in tensors:
        tensor.copy_(total)


def broadcast(tensors: Tensors, root: int) -> None:
    """All become the one of rank ``root``."""
    for rank, tensor in enumerate(tensors):
        if rank != root:
            tensor.copy_(tensors[root])
