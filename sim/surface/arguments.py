"""Reading and checking what torch passes to the methods of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from refmodel.errors import InvalidInput, Where
from sim.failures import WorldUnavailable

Tensors = tuple[torch.Tensor, ...]


def as_tuple(tensors: torch.Tensor | Sequence[torch.Tensor]) -> Tensors:
    return (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)


def read_async(method: str, arguments: tuple[Any, ...], place: int) -> bool:
    try:
        return bool(arguments[place].asyncOp)
    except IndexError:
        return True  # torch's default; dist.* always says
    except AttributeError:
        if arguments[place] is None:
            return True
        raise WorldUnavailable(
            f"{method} of a process group",
            expected="its options as one object, as torch.distributed passes them",
            received=repr(arguments[place]),
            fix="Call the function of torch.distributed.",
        ) from None


def read_root(arguments: tuple[Any, ...], place: int) -> int:
    return int(arguments[place].rootRank) if len(arguments) > place else 0


# By the hash of the C++ object: each attribute on the way to its name costs as much again. PREMUL_SUM, which
# takes a factor, cannot be made from its name alone.
_PLAIN = {name: kind for name, kind in dist.ReduceOp.RedOpType.__members__.items() if name != "PREMUL_SUM"}
_FOLD_NAMES = {hash(dist.ReduceOp(kind)): name for name, kind in _PLAIN.items()}
_BITWISE = ("BAND", "BOR", "BXOR")


def read_fold(arguments: tuple[Any, ...], place: int, tensors: Tensors, rank: int) -> str:
    if len(arguments) <= place:
        return "SUM"
    fold = arguments[place].reduceOp
    name = _FOLD_NAMES.get(hash(fold)) or str(fold.op.name)
    if name in _BITWISE and any(tensor.is_floating_point() for tensor in tensors):
        raise refused("reduction", f"integers for {name}", shown(tensors[0]), rank)
    return name


def peer_detail(word: str, peer: object, tag: int) -> str:
    return f"{word} {peer} tag {tag}" if tag else f"{word} {peer}"


def read_splits(
    side: str, tensor: torch.Tensor, splits: Sequence[int] | None, size: int, rank: int
) -> tuple[int, ...]:
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if rows % size:
            raise refused(f"{side} of all_to_all", f"rows divisible by {size}", shown(tensor), rank)
        return (rows // size,) * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise refused(f"{side} splits of all_to_all", f"{size} that add up to {rows}", list(splits), rank)
    return tuple(splits)


def check_parts(what: str, parts: Tensors, like: torch.Tensor, size: int, rank: int) -> None:
    if len(parts) != size or any(part.shape != like.shape or part.dtype != like.dtype for part in parts):
        received = ", ".join(shown(part) for part in parts)
        raise refused(what, f"{size} tensors like {shown(like)}", received, rank)


def check_multiples(what: str, large: Tensors, small: Tensors, size: int, rank: int) -> None:
    if len(large) != len(small):
        raise refused(what, f"{len(small)} tensors", len(large), rank)
    for one, other in zip(large, small, strict=True):
        if one.numel() != size * other.numel() or one.dtype != other.dtype:
            raise refused(what, f"{size} times {shown(other)}", shown(one), rank)


def of_each(tensors: Sequence[torch.Tensor]) -> str:
    """The shapes of several tensors, which no one word says; nothing for one."""
    if len(tensors) == 1:
        return ""
    return f" of {', '.join(str(list(tensor.shape)) for tensor in tensors)}"


def shown(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def refused(what: str, expected: str, received: object, rank: int) -> InvalidInput:
    return InvalidInput(what, expected=expected, received=received, where=Where(rank=rank))
